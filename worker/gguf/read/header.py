"""The header of a GGUF file: metadata and the table of tensors.

Parsed by code of ours, because the reader of the `gguf` package takes seconds for a large
vocabulary and trusts every length in the file. Here each count and length is compared with the
bytes that are left before anything is allocated. All errors are JobError("unsupported_model").
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from jobs.errors import JobError
from jobs.sizes import size_text
from worker.checkpoint.foreign import FIRST_BYTES, GGUF, foreign
from worker.checkpoint.pieces import how_to_join
from worker.gguf.tensor_format import READABLE

LENGTH = struct.Struct("<Q")  # of a string
VERSIONS = (2, 3)
AGAIN = "download the model again"
MAX_HEADER = 100_000_000  # bytes; the largest published vocabularies take 20 MB
MAX_DIMENSIONS, MAX_ELEMENTS = 4, 2**48
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
# The smallest entries: an empty key with a one-byte value; an empty name with no dimension.
MIN_PAIR, MIN_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8

_NUMBERS = {
    GGUFValueType.UINT8: "u1",
    GGUFValueType.INT8: "i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "u1",
}
_DTYPES = {kind: np.dtype(name) for kind, name in _NUMBERS.items()}


class Incomplete(Exception):
    """The buffer ends within the header and the file goes on: read at least `needed` bytes."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of the table. `begin` and `end` are byte offsets in the file."""

    file: Path
    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]  # row-major: the dimensions of the file in reverse
    begin: int
    end: int


Tensors = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class Header:
    """The header of one file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Tensors


def parse(buffer: bytes | memoryview, size: int, path: Path) -> Header:
    """The header at the start of a file of `size` bytes, whose first bytes are in `buffer`.

    Raises Incomplete if a file's first bytes are not enough.
    """
    return _Parser(memoryview(buffer), size, path).header()


class _Parser:
    """A cursor over the bytes of one header."""

    def __init__(self, buffer: memoryview, size: int, path: Path) -> None:
        self._buffer, self._size, self._path = buffer, size, path
        self._at = 0

    def header(self) -> Header:
        tensors, pairs = self._counts()
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text("a metadata key")
            if key in metadata:
                raise self._broken(f"its metadata has {key} twice")
            metadata[key] = self._value(key)
        alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
        valid = type(alignment) is int and alignment >= 8 and alignment & (alignment - 1) == 0
        if not valid:
            raise self._broken(
                f"{ALIGNMENT_KEY} must be a power of two of at least 8, got {alignment!r}"
            )
        entries = [self._entry() for _ in range(tensors)]
        start = -(-self._at // alignment) * alignment
        table: dict[str, StoredTensor] = {}
        for name, kind, shape, offset in entries:
            if name in table:
                raise self._broken(f"it has tensor {name} twice")
            table[name] = self._placed(name, kind, shape, offset, start, alignment)
        self._check_overlaps(table)
        return Header(self._path, metadata, table)

    def _counts(self) -> tuple[int, int]:
        """Checks magic and version. Returns the numbers of tensors and of metadata entries."""
        if bytes(self._buffer[:4]) != GGUF:
            what = foreign(bytes(self._buffer[:FIRST_BYTES])) or how_to_join(self._path)
            raise JobError(
                "unsupported_model",
                f"{self._path} is not a GGUF file: it begins with {bytes(self._buffer[:4])!r}, not "
                f"{GGUF!r}; {f'it {what}' if what else AGAIN}",
            )
        self._at = 4
        version = self._unpack("<I", "its version")
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        supported = " and ".join(map(str, VERSIONS))
        if version not in VERSIONS and swapped in VERSIONS:
            raise self._refused(
                "is a big-endian GGUF file; only little-endian ones are supported: use a file that "
                "was converted for little-endian machines"
            )
        if version not in VERSIONS:
            raise self._refused(
                f"is a GGUF file of version {version}; supported: {supported}. Convert the model "
                "again with a current llama.cpp"
            )
        tensors = self._unpack("<Q", "its tensor count")
        pairs = self._unpack("<Q", "its metadata count")
        self._check_room(tensors, MIN_TENSOR, "tensors")
        self._check_room(pairs, MIN_PAIR, "metadata entries")
        return tensors, pairs

    def _value(self, key: str) -> Any:
        kind = self._kind(f"the type of {key}")
        if kind is GGUFValueType.STRING:
            return self._text(key)
        if kind is not GGUFValueType.ARRAY:
            return self._numbers(kind, 1, key)[0]
        inner = self._kind(f"the type of {key}")
        count = self._unpack("<Q", f"the length of {key}")
        if inner is GGUFValueType.ARRAY:
            raise self._broken(f"{key} is an array of arrays")
        if inner is not GGUFValueType.STRING:
            self._check_room(count, _DTYPES[inner].itemsize, f"values in {key}")
            return self._numbers(inner, count, key)
        self._check_room(count, 8, f"strings in {key}")
        return self._texts(count, key)

    def _texts(self, count: int, key: str) -> list[str]:
        """An array of strings. One function without calls per string: vocabularies are large."""
        buffer, at, end, unpack = self._buffer, self._at, len(self._buffer), LENGTH.unpack_from
        texts: list[str] = []
        for _ in range(count):
            if at + 8 > end:
                self._require(at + 8, key)
            (length,) = unpack(buffer, at)
            if at + 8 + length > end:
                self._require(at + 8 + length, key)
            at += 8 + length
            texts.append(self._decoded(buffer[at - length : at], key))
        self._at = at
        return texts

    def _entry(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._text("a tensor name")
        what = f"the entry of tensor {name}"
        count = self._unpack("<I", what)
        if count > MAX_DIMENSIONS:
            raise self._broken(f"tensor {name} has {count} dimensions; at most {MAX_DIMENSIONS}")
        shape = tuple(self._unpack("<Q", what) for _ in range(count))[::-1]
        number = self._unpack("<I", what)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            kind = None
        if kind not in READABLE:
            known = ", ".join(one.name for one in READABLE)
            stored = f"{kind.name} ({number})" if kind is not None else str(number)
            raise self._refused(
                f"stores tensor {name} with type {stored}; supported: {known}. Use a file with "
                "another quantisation"
            )
        return name, kind, shape, self._unpack("<Q", what)

    def _placed(
        self,
        name: str,
        kind: GGMLQuantizationType,
        shape: tuple[int, ...],
        offset: int,
        start: int,
        alignment: int,
    ) -> StoredTensor:
        elements = prod(shape)
        if not shape or not 0 < elements <= MAX_ELEMENTS:
            raise self._broken(f"tensor {name} has the impossible shape {list(shape)}")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self._broken(
                f"tensor {name} has rows of {shape[-1]} values, which {kind.name} can't store in "
                f"blocks of {block}"
            )
        if offset % alignment:
            raise self._broken(f"tensor {name} is not aligned to {alignment} bytes")
        begin, end = start + offset, start + offset + elements // block * block_bytes
        if end > self._size:
            raise self._cut(
                f"it is truncated: tensor {name} ends at byte {end}, the file at {self._size}"
            )
        return StoredTensor(self._path, name, kind, shape, begin, end)

    def _check_overlaps(self, table: Tensors) -> None:
        ordered = sorted(table.values(), key=lambda tensor: tensor.begin)
        for one, other in pairwise(ordered):
            if one.end > other.begin:
                raise self._broken(f"the tensors {one.name} and {other.name} overlap")

    def _kind(self, what: str) -> GGUFValueType:
        number = self._unpack("<I", what)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._broken(f"{what} is {number}, which no version defines") from None

    def _numbers(self, kind: GGUFValueType, count: int, key: str) -> list[Any]:
        dtype = _DTYPES[kind]
        values = np.frombuffer(self._take(count * dtype.itemsize, key), dtype)
        if kind is GGUFValueType.BOOL:
            values = values != 0
        items: list[Any] = values.tolist()
        return items

    def _text(self, what: str) -> str:
        length = self._unpack("<Q", f"the length of {what}")
        return self._decoded(self._take(length, what), what)

    def _decoded(self, raw: memoryview, what: str) -> str:
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self._broken(f"{what} is not UTF-8 text") from None

    def _unpack(self, form: str, what: str) -> int:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form), what))
        return int(value)

    def _take(self, count: int, what: str) -> memoryview:
        end = self._at + count
        if end > len(self._buffer):
            self._require(end, what)
        taken = self._buffer[self._at : end]
        self._at = end
        return taken

    def _require(self, end: int, what: str) -> None:
        """Raise, because the buffer ends before `end`."""
        if end > self._size:
            raise self._cut(f"it is truncated: {what} ends beyond its {size_text(self._size)}")
        if end > MAX_HEADER:
            raise self._broken(f"its header has more than {MAX_HEADER} bytes")
        raise Incomplete(end)

    def _check_room(self, count: int, least: int, what: str) -> None:
        left = min(self._size, MAX_HEADER) - self._at
        if count * least > left:
            has = size_text(max(left, 0))
            raise self._cut(f"its header states {count} {what}, and has {has}")

    def _cut(self, fact: str) -> JobError:
        what = how_to_join(self._path)
        return self._broken(fact, f"it {what}" if what else AGAIN)

    def _broken(self, fact: str, remedy: str = AGAIN) -> JobError:
        return JobError("unsupported_model", f"{self._path} is broken: {fact}; {remedy}")

    def _refused(self, fact: str) -> JobError:
        return JobError("unsupported_model", f"{self._path} {fact}")
