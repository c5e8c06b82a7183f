"""Safetensors files of a model folder: one file, or shards with an index.

All headers are read and checked before any weight is. Format: the safetensors specification
(8 bytes of header length, a JSON header, then the tensors).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from operator import index as whole
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from jobs.errors import JobError
from worker.loading.config import present
from worker.loading.pages import release

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes, as the format's own reader allows
RELEASE_BYTES = 128 * 2**20  # read pages that stay resident while loading
SAMPLE = 1 << 16  # bytes of each tensor that the fingerprint reads

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class TensorHeader:
    """What a file says of one tensor. `begin` and `end` are bytes from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """The tensors of a folder by name. Use as a context manager; raises JobError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = ExitStack()
        self._open: dict[Path, Any] = {}
        self._touched = 0  # bytes whose pages may be resident
        self._last = ""  # the tensor that was read last
        self.tensors: dict[str, TensorHeader] = {}
        if present(folder / SINGLE):  # it counts before an index, as in transformers
            self.tensors = _read_header(folder / SINGLE)
        elif present(folder / INDEX):
            self._read_shards()
        else:
            raise JobError(
                "model_not_found",
                f"{folder} has no weights: neither {SINGLE} nor {INDEX} is there; download the "
                "model again, or convert it to safetensors",
            )
        if not self.tensors:
            single = present(folder / SINGLE)
            raise _broken(folder / (SINGLE if single else INDEX), "it holds no tensors")

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

    def dtype(self) -> torch.dtype:
        """The dtype that most values are stored in. Raises JobError if it is none of ours."""
        sizes: dict[str, int] = {}
        for header in self.tensors.values():
            sizes[header.dtype] = sizes.get(header.dtype, 0) + prod(header.shape)
        most = max(sizes, key=lambda name: sizes[name])
        if most not in DTYPES:
            raise JobError(
                "unsupported_model",
                f"{self.folder} stores its weights as {most}; supported: {', '.join(DTYPES)}",
            )
        return DTYPES[most]

    def read(self, name: str) -> torch.Tensor:
        """One tensor, as a view of the mapped file: its pages are read when they are used."""
        header = self.tensors[name]
        if name != self._last:
            self._last = name
            self._touched += header.end - header.begin
            if self._touched > RELEASE_BYTES:
                release(self._open)
                self._touched = header.end - header.begin
        try:
            if header.file not in self._open:
                opened = safe_open(header.file, framework="pt")
                self._open[header.file] = self._files.enter_context(opened)
            tensor: torch.Tensor = self._open[header.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _broken(header.file, f"tensor {name} can't be read ({error})") from None
        return tensor

    def fingerprint(self) -> str:
        """A hash of what the weights are: every tensor's name, dtype and shape, and its first
        64 KiB. Cheap, and it changes with any retraining; it doesn't prove every byte."""
        digest = hashlib.sha256()
        for name, header in sorted(self.tensors.items()):
            digest.update(f"{name}|{header.dtype}|{header.shape}|".encode())
            with open(header.file, "rb") as file:
                file.seek(header.begin)
                digest.update(file.read(min(SAMPLE, header.end - header.begin)))
        return digest.hexdigest()[:32]

    def _read_shards(self) -> None:
        shards: dict[str, dict[str, TensorHeader]] = {}
        for name, file in _weight_map(self.folder).items():
            if file not in shards:
                shards[file] = _read_header(self._shard(file))
            if name not in shards[file]:
                fact = f"tensor {name} is not in {file}, where the index puts it"
                raise _broken(self.folder / INDEX, fact)
            self.tensors[name] = shards[file][name]

    def _shard(self, file: str) -> Path:
        path = self.folder / file
        try:
            there = path.is_file()
        except OSError as error:  # too long a name
            raise _broken(path, f"it can't be opened ({error.strerror})") from None
        if not there:
            raise JobError(
                "model_not_found",
                f"{self.folder / INDEX} names the shard {file}, which is not there: download the "
                "model again",
            )
        return path


def weight_files(folder: Path) -> list[str]:
    """The names of a model's weight files, there or not. Raises JobError for a broken index."""
    if present(folder / SINGLE) or not present(folder / INDEX):
        return [SINGLE]
    return sorted(set(_weight_map(folder).values()))


def is_there(folder: Path) -> bool:
    """Whether a folder has all of its weight files, whole or not. Raises JobError."""
    return all((folder / file).is_file() for file in weight_files(folder))


def _weight_map(folder: Path) -> dict[str, str]:
    """The index: tensor → shard, a name within the folder."""
    index = folder / INDEX
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = {str(name): str(file) for name, file in where.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _broken(index, "it is not a safetensors index with a weight_map") from None
    for file in pairs.values():
        # Files of the hub's cache are links to blobs beside the snapshot: the name is what counts.
        if Path(file).name != file:
            raise _broken(index, f"shard '{file}' lies outside the folder")
    return pairs


def _read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one file, checked against its size."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise _broken(path, f"it has only {size} bytes")
            length = struct.unpack("<Q", start)[0]
            if length > min(size - 8, MAX_HEADER):
                raise _broken(path, f"its header wants {length} bytes, the file has {size}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise _broken(path, f"it can't be opened ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise _broken(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    return dict(_tensors(path, header, 8 + length, size))


def _tensors(path: Path, header: Any, offset: int, size: int) -> Iterator[tuple[str, TensorHeader]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = map(whole, entry["data_offsets"])
            shape = tuple(map(whole, entry["shape"]))
            tensor = TensorHeader(path, str(entry["dtype"]), shape, offset + begin, offset + end)
        except (KeyError, TypeError, ValueError):
            raise _broken(path, f"the entry of tensor {name} is not as the format wants") from None
        bytes_each = DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else None
        fits = bytes_each is None or prod(shape) * bytes_each == end - begin
        if begin < 0 or end < begin or min(shape, default=0) < 0 or not fits:
            raise _broken(path, f"the shape of tensor {name} doesn't fit its place in the file")
        if tensor.end > size:
            raise _broken(
                path, f"it is cut off: tensor {name} ends at byte {tensor.end}, the file at {size}"
            )
        yield name, tensor


def _broken(path: Path, fact: str) -> JobError:
    return JobError("unsupported_model", f"{path} is broken: {fact}; download the model again")
