"""The safetensors files of a model folder: a single file, or shards with an index.

All headers are read and checked before any weight. Format (see the safetensors specification): the
length of the header in 8 bytes, the header as JSON, then the tensors.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack
from math import prod
from operator import index as integer
from pathlib import Path
from stat import S_ISREG
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from jobs.errors import JobError
from jobs.sizes import size_text
from worker.checkpoint.dtypes import FROM_SAFETENSORS
from worker.checkpoint.files import present
from worker.checkpoint.foreign import first_bytes, require_own, why_without
from worker.checkpoint.headers import SAMPLE_BYTES, TensorHeader
from worker.checkpoint.pieces import how_to_join
from worker.processes.pages import ReadPages, release

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library

Broken = Callable[[Path, str], JobError]  # file, fact


class SafetensorsHeaders:
    """Implements Headers."""

    described_by = "config.json"
    readable = FROM_SAFETENSORS

    def __init__(self, location: Path, tensors: Mapping[str, TensorHeader]) -> None:
        self.location, self.tensors = location, tensors

    def label(self, name: str) -> str:
        return name

    def dtype(self, quantised: Container[str] = ()) -> torch.dtype | None:
        sizes: dict[str, int] = {}
        for header in self.tensors.values():
            sizes[header.dtype] = sizes.get(header.dtype, 0) + prod(header.shape)
        most = max(sizes, key=lambda name: sizes[name])
        if most in quantised:
            return None
        if most not in FROM_SAFETENSORS:
            raise JobError(
                "unsupported_model",
                f"{self.location} stores its weights as {most}; supported: "
                f"{', '.join(FROM_SAFETENSORS)}",
            )
        return FROM_SAFETENSORS[most]


class SafetensorsCheckpoint(SafetensorsHeaders):
    """Implements Checkpoint for the files of a folder. `single`: the name of one file with all
    weights.

    Files are opened on the first read of a tensor and closed at the end.
    """

    def __init__(self, folder: Path, single: str = SINGLE) -> None:
        self._files = ExitStack()
        self._open: dict[Path, Any] = {}
        self._pages = ReadPages()
        if present(folder / single):  # takes precedence over an index, as in transformers
            tensors = read_header(folder / single)
        elif present(folder / INDEX):
            tensors = _read_shards(folder)
        else:
            raise JobError(
                "model_not_found",
                f"{folder} has no weights: neither {SINGLE} nor {INDEX} exists; "
                + why_without(
                    folder, "download the model again, or convert it to safetensors", weights=True
                ),
            )
        super().__init__(folder, tensors)
        if not tensors:
            whole = present(folder / single)
            raise _broken(folder / (single if whole else INDEX), "it contains no tensors")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()
        release(self._open)

    def read(self, name: str) -> torch.Tensor:
        header = self.tensors[name]
        self._pages.reading(name, header.end - header.begin, self._open)
        try:
            if header.file not in self._open:
                opened = safe_open(header.file, framework="pt")
                self._open[header.file] = self._files.enter_context(opened)
            tensor: torch.Tensor = self._open[header.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _broken(header.file, f"tensor {name} cannot be read ({error})") from None
        return tensor

    def fingerprint(self) -> str:
        """A hash of every tensor's name, dtype, shape and first 64 KiB: cheap, and different after
        any retraining, but it doesn't cover every byte."""
        digest = hashlib.sha256()
        for name, header in sorted(self.tensors.items()):
            digest.update(f"{name}|{header.dtype}|{header.shape}|".encode())
            with open(header.file, "rb") as file:
                file.seek(header.begin)
                digest.update(file.read(min(SAMPLE_BYTES, header.end - header.begin)))
        return digest.hexdigest()[:32]


def weight_files(folder: Path) -> list[str]:
    """The names of a model's weight files, existing or not. Raises JobError for a broken index."""
    if present(folder / SINGLE) or not present(folder / INDEX):
        return [SINGLE]
    return sorted(set(_weight_map(folder).values()))


def combine(
    folder: Path, read: Callable[[str], Mapping[str, TensorHeader]]
) -> dict[str, TensorHeader]:
    """The tensors that the index names, from the headers that `read` returns for a shard's name.

    Raises JobError("unsupported_model") if a shard lacks a tensor that the index puts there.
    """
    shards: dict[str, Mapping[str, TensorHeader]] = {}
    tensors = {}
    for name, file in _weight_map(folder).items():
        if file not in shards:
            shards[file] = read(file)
        if name not in shards[file]:
            fact = f"tensor {name} is not in {file}, where the index puts it"
            raise _broken(folder / INDEX, fact)
        tensors[name] = shards[file][name]
    return tensors


def _read_shards(folder: Path) -> dict[str, TensorHeader]:
    return combine(folder, lambda file: read_header(_shard(folder, file)))


def _shard(folder: Path, file: str) -> Path:
    path = folder / file
    try:
        exists = path.is_file()
    except OSError as error:  # a name that is too long
        raise _broken(path, f"it cannot be opened ({error.strerror})") from None
    if not exists:
        raise JobError(
            "model_not_found",
            f"{folder / INDEX} names the shard {file}, which does not exist: "
            + why_without(folder, "download the model again"),
        )
    return path


def _weight_map(folder: Path) -> dict[str, str]:
    """The index: tensor name → file name of its shard."""
    index = folder / INDEX
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _broken(index, "it is not a safetensors index with a weight_map") from None
    for file in shards.values():
        # Only the name is checked: in the hub's cache, files are links to blobs outside the folder.
        if Path(file).name != file:
            raise _broken(index, f"shard '{file}' is outside the folder")
    return shards


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one file, checked against its size."""
    require_own(path, first_bytes(path))
    try:
        return read_tensors(path, _broken)[0]
    except OSError as error:
        raise _broken(path, f"it cannot be opened ({error.strerror})") from None


def read_tensors(path: Path, broken: Broken) -> tuple[dict[str, TensorHeader], Any]:
    """The tensors of one file, checked against its size, and its metadata, unchecked. Raises what
    `broken` makes of a fact, and OSError."""
    stat = path.stat()
    if not S_ISREG(stat.st_mode):  # opening a pipe would wait for its writer
        raise broken(path, "it is no regular file")
    size = stat.st_size
    with open(path, "rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise broken(path, f"it has only {size_text(size)}")
        length = struct.unpack("<Q", start)[0]
        if length > min(size - 8, MAX_HEADER):
            raise broken(path, f"its header has {size_text(length)}, the file {size_text(size)}")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise broken(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise broken(path, "its header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    return dict(_tensors(path, header, 8 + length, size, broken)), metadata


def _tensors(
    path: Path, header: dict[str, Any], offset: int, size: int, broken: Broken
) -> Iterator[tuple[str, TensorHeader]]:
    for name, entry in header.items():
        try:
            begin, end = map(integer, entry["data_offsets"])
            shape = tuple(map(integer, entry["shape"]))
            tensor = TensorHeader(path, str(entry["dtype"]), shape, offset + begin, offset + end)
        except (KeyError, TypeError, ValueError):
            raise broken(path, f"the entry of tensor {name} is malformed") from None
        dtype = FROM_SAFETENSORS.get(tensor.dtype)
        fits = dtype is None or prod(shape) * dtype.itemsize == end - begin
        if begin < 0 or end < begin or min(shape, default=0) < 0 or not fits:
            raise broken(path, f"the shape of tensor {name} doesn't match its size in the file")
        if tensor.end > size:
            raise broken(
                path,
                f"it is truncated: tensor {name} ends at byte {tensor.end}, the file at {size}",
            )
        yield name, tensor


def _broken(path: Path, fact: str) -> JobError:
    what = how_to_join(path)
    remedy = f"it {what}" if what else "download the model again"
    return JobError("unsupported_model", f"{path} is broken: {fact}; {remedy}")
