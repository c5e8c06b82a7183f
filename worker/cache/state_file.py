"""State of a text as a safetensors file: tensors per layer, and in the metadata what computed them.

A file appears under its name when it is complete, and a checksum of all that it holds is compared
before it is used. Tensors are written and read as bytes, by numpy: torch would start a further team
of threads for each thread that calls it.
"""

from __future__ import annotations

import json
import os
import struct
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from jobs.disk import sync_folder
from jobs.errors import InvalidRequest, invalid
from jobs.sizes import counted
from worker.cache.copies import Copy
from worker.cache.prefix_state import PrefixState
from worker.cache.prefix_store import BLOCK
from worker.cache.state_layout import StateLayout, StateTensor
from worker.checkpoint.dtypes import FROM_SAFETENSORS
from worker.checkpoint.headers import TensorHeader
from worker.checkpoint.safetensors_files import read_tensors

FORMAT, VERSION = "chatjobs prompt cache", 1
PARTIAL = ".partial"  # end of the names of files being written
NO_CRC = "0" * 8  # in the header while its CRC is computed
CHUNK_BYTES = 1 << 24  # read at once for the checksum
TO_SAFETENSORS = {dtype: name for name, dtype in FROM_SAFETENSORS.items()}
RAW: dict[int, tuple[torch.dtype, npt.DTypeLike]] = {  # by bytes of a value
    2: (torch.int16, np.int16),
    4: (torch.int32, np.int32),
    8: (torch.int64, np.int64),
}

Values = npt.NDArray[Any]


class Damaged(InvalidRequest):
    """A file is truncated or changed, or no safetensors file at all: `fact`."""

    def __init__(self, path: Path, fact: str) -> None:
        sentence = f"{path} can't be used as a prompt cache: {fact}; save it again"
        super().__init__("invalid_request", sentence, "prompt_cache")
        self.path, self.fact = path, fact

    def __reduce__(self) -> tuple[Any, ...]:
        return (Damaged, (self.path, self.fact))


class Unreadable(InvalidRequest):
    """A file that may be whole can't be opened or read now."""

    def __init__(self, path: Path, error: OSError) -> None:
        fact = error.strerror or type(error).__name__
        sentence = f"{path} cannot be opened or read: {fact}"
        super().__init__("invalid_request", sentence, "prompt_cache")
        self.path, self.error = path, error

    def __reduce__(self) -> tuple[Any, ...]:
        return (Unreadable, (self.path, self.error))


@dataclass(frozen=True)
class Origin:
    """The model that computed a state, and its settings. State is used where all but `model` is
    equal, and by engines that need no `stride` whatever it is."""

    model: str
    fingerprint: str  # of weights and configuration
    dtype: str
    kinds: tuple[str, ...]  # of the layers' caches
    rotation: tuple[int, ...]
    stride: int | None  # tokens between the cuts of its prefill; None: it was cut anywhere
    salt: str = ""  # a `salt_hash`


@dataclass(frozen=True)
class StateFile:
    """A file whose header has been read."""

    path: Path
    origin: Origin
    token_ids: list[int]
    ends: tuple[int, ...]  # of its snapshots
    crc: str
    tensors: dict[str, TensorHeader]

    @classmethod
    def open(cls, path: Path) -> StateFile:
        """Read the header. Raises JobError if it is no such file, or truncated, or newer."""
        try:
            tensors, metadata = read_tensors(path, Damaged)
        except OSError as error:
            raise Unreadable(path, error) from None
        if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
            raise invalid(
                f"{path} is no prompt cache: its metadata does not say so; `chatjobs prompts save` "
                "writes one",
                "prompt_cache",
            )
        version = metadata.get("version")
        if version != str(VERSION):
            raise invalid(
                f"{path} has version {version} of the format, and this chatjobs reads version "
                f"{VERSION}: install a newer one, or save the file again",
                "prompt_cache",
            )
        try:
            origin = Origin(
                model=str(metadata["model"]),
                fingerprint=str(metadata["fingerprint"]),
                dtype=str(metadata["dtype"]),
                kinds=tuple(map(str, json.loads(metadata["cache_kinds"]))),
                rotation=tuple(_integers(metadata["rotation"])),
                stride=int(metadata["stride"]) or None,
                salt=str(metadata["salt"]),
            )
            token_ids = _integers(metadata["token_ids"])
            ends = tuple(sorted(_integers(metadata["snapshots"])))
            crc = str(metadata["crc32"])
        except (KeyError, TypeError, ValueError, RecursionError):
            raise Damaged(path, "its metadata is malformed") from None
        return cls(path, origin, token_ids, ends, crc, tensors)

    def check(self, layout: StateLayout) -> None:
        """Raise JobError unless the tensors are those of these caches and tokens."""
        count = len(self.token_ids)
        fits = all(0 < end <= count for end in self.ends)
        if count < BLOCK or not fits or bool(self.ends) != bool(layout.snapshot(count)):
            ends = f"snapshots after {[*self.ends]}"
            raise Damaged(self.path, f"it holds {counted(count, 'token')} and {ends}")
        wanted = {one.name: one for one in layout.blocks(count)}
        wanted |= {one.name: one for end in self.ends for one in layout.snapshot(end)}
        if wanted.keys() != self.tensors.keys():
            name = min(wanted.keys() ^ self.tensors.keys())
            fact = "lacks" if name in wanted else "has"
            raise invalid(
                f"{self.path} has other tensors than this model's caches: it {fact} {name}; save "
                "it again with this model",
                "prompt_cache",
            )
        for name, header in self.tensors.items():
            tensor = wanted[name]
            dtype = FROM_SAFETENSORS.get(header.dtype)
            if (header.shape, dtype) != (tensor.shape, tensor.dtype):
                raise invalid(
                    f"{self.path} has other shapes than this model's caches: {name} is "
                    f"{header.dtype} {list(header.shape)}, and should be "
                    f"{TO_SAFETENSORS[tensor.dtype]} {list(tensor.shape)}; save it again with "
                    "this model",
                    "prompt_cache",
                )

    def read(
        self, layout: StateLayout, device: torch.device, end: int, ends: Sequence[int]
    ) -> PrefixState:
        """The state of the first `end` tokens with the snapshots after `ends`. Raises JobError."""
        cuts = [(at, min(end, at + BLOCK)) for at in range(0, end, BLOCK)]
        try:
            with open(self.path, "rb") as file:
                intact = checksum(file, self.crc) == self.crc
                blocks = self._copies(file, layout.blocks(len(self.token_ids)), cuts, device)
                snapshots = {
                    one: self._copies(file, layout.snapshot(one), [None], device)[0] for one in ends
                }
        except OSError as error:
            raise Unreadable(self.path, error) from None
        except (ValueError, struct.error) as error:  # it has become shorter meanwhile
            raise Damaged(self.path, f"it cannot be read ({error})") from None
        if not intact:
            raise Damaged(self.path, "its checksum is not that of its contents")
        return PrefixState(self.token_ids[:end], blocks, snapshots)

    def _copies(
        self,
        file: BinaryIO,
        tensors: list[StateTensor],
        cuts: Sequence[tuple[int, int] | None],
        device: torch.device,
    ) -> list[Copy]:
        """One copy per range of tokens; None: of all there is. As `Copy.of` makes them."""
        groups: dict[tuple[tuple[int, ...], torch.dtype], list[StateTensor]] = {}
        order = []
        for tensor in tensors:
            members = groups.setdefault((tensor.shape, tensor.dtype), [])
            number = list(groups).index((tensor.shape, tensor.dtype))
            order.append((number, len(members)))
            members.append(tensor)
        copies: list[list[torch.Tensor]] = [[] for _ in cuts]
        for (shape, dtype), members in groups.items():
            raw = RAW[dtype.itemsize][1]
            parts = [np.empty((len(members), *_cut_shape(shape, cut)), raw) for cut in cuts]
            for row, tensor in enumerate(members):
                file.seek(self.tensors[tensor.name].begin)
                values = np.fromfile(file, raw, count=prod(shape)).reshape(shape)
                for part, cut in zip(parts, cuts, strict=True):
                    part[row] = values if cut is None else values[:, cut[0] : cut[1]]
            for copy, part in zip(copies, parts, strict=True):
                copy.append(torch.from_numpy(part).view(dtype).to(device))
        return [Copy(tuple(copy), tuple(order)) for copy in copies]


def write_state(path: Path, origin: Origin, layout: StateLayout, state: PrefixState) -> int:
    """Write a file, which appears under its name when it is complete and on the disk. Returns its
    bytes. Raises OSError."""
    ends = sorted(state.snapshots)
    tensors = layout.blocks(len(state.token_ids))
    for end in ends:
        tensors += layout.snapshot(end)
    header = _header(origin, state.token_ids, ends, tensors, NO_CRC)
    crc = zlib.crc32(header)
    # In containers, all workers that share a folder have one pid.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        with open(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(header)
            for values in _values(state, ends):
                data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
                crc = zlib.crc32(data, crc)
                file.write(data)
            size = file.tell()
            file.seek(0)
            file.write(header.replace(_crc_field(NO_CRC), _crc_field(f"{crc:08x}")))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
    return size


def checksum(file: BinaryIO, stated: str) -> str:
    """The CRC of tensors and header of a file whose header states one. Raises struct.error if it is
    truncated."""
    file.seek(0)
    start = file.read(8)
    header = file.read(struct.unpack("<Q", start)[0])
    crc = zlib.crc32(start + header.replace(_crc_field(stated), _crc_field(NO_CRC)))
    while chunk := file.read(CHUNK_BYTES):
        crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def _crc_field(crc: str) -> bytes:
    """The entry of the checksum in a header."""
    return f'"crc32":"{crc}"'.encode()


def _header(
    origin: Origin,
    token_ids: Sequence[int],
    ends: Sequence[int],
    tensors: Sequence[StateTensor],
    crc: str,
) -> bytes:
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "version": str(VERSION),
            "model": origin.model,
            "fingerprint": origin.fingerprint,
            "dtype": origin.dtype,
            "cache_kinds": json.dumps(origin.kinds),
            "rotation": json.dumps(origin.rotation),
            "stride": str(origin.stride or 0),
            "salt": origin.salt,
            "token_ids": json.dumps([*token_ids], separators=(",", ":")),
            "snapshots": json.dumps([*ends]),
            "crc32": crc,
        }
    }
    begin = 0
    for one in tensors:
        end = begin + prod(one.shape) * one.dtype.itemsize
        dtype = TO_SAFETENSORS[one.dtype]
        header[one.name] = {"dtype": dtype, "shape": one.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _values(state: PrefixState, ends: Sequence[int]) -> Iterator[Values]:
    """The values of the tensors, in their order in the file."""
    blocks = [(_raw(block), block.order) for block in state.blocks]
    for view in range(len(state.blocks[0].order)):
        yield np.concatenate(
            [raw[order[view][0]][order[view][1]] for raw, order in blocks],
            axis=1,
        )
    for end in ends:
        snapshot = state.snapshots[end]
        raw = _raw(snapshot)
        for tensor, row in snapshot.order:
            yield raw[tensor][row]


def _raw(copy: Copy) -> list[Values]:
    return [one.view(RAW[one.element_size()][0]).cpu().numpy() for one in copy.tensors]


def _cut_shape(shape: tuple[int, ...], cut: tuple[int, int] | None) -> tuple[int, ...]:
    return shape if cut is None else (shape[0], cut[1] - cut[0], *shape[2:])


def _integers(text: str) -> list[int]:
    values = json.loads(text)
    if not isinstance(values, list) or not all(map(_is_integer, values)):
        raise ValueError(text)
    return values


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 31
