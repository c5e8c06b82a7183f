"""Writes GGUF files byte by byte, with whatever damage a test asks for."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

STRING, ARRAY, UINT32, FLOAT32, BOOL = 8, 9, 4, 6, 7
F32, Q8_0 = 0, 8


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_of(value: Any) -> bytes:
    """A metadata value with its type. Bytes are taken as they are."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    assert isinstance(value, list)
    kind = STRING if isinstance(value[0], str) else UINT32
    items = [text(item) if kind == STRING else struct.pack("<I", item) for item in value]
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(items)


@dataclass
class Raw:
    """A file. `tensors`: (name, dimensions as stored, type, offset in the data)."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: list[tuple[str, tuple[int, ...], int, int]] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    order: str = "<"  # of the version
    tensor_count: int | None = None
    pair_count: int | None = None
    alignment: int = 32

    def bytes(self, more_pairs: Iterable[tuple[str, Any]] = ()) -> bytes:
        pairs = [*self.metadata.items(), *more_pairs]
        counts = (
            len(self.tensors) if self.tensor_count is None else self.tensor_count,
            len(pairs) if self.pair_count is None else self.pair_count,
        )
        out = self.magic + struct.pack(self.order + "I", self.version) + struct.pack("<QQ", *counts)
        for key, value in pairs:
            out += text(key) + value_of(value)
        for name, shape, kind, offset in self.tensors:
            out += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
            out += struct.pack("<IQ", kind, offset)
        return out + b"\0" * (-len(out) % self.alignment) + self.data
