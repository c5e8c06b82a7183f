"""Damaged headers: one typed error each, before anything large is allocated or read."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from jobs import JobError
from tests.worker.gguf.raw import F32, Q8_0, Raw
from worker.gguf.read import header
from worker.gguf.read.header import Header, Incomplete, parse

FILE = Path("m.gguf")
MOST = 2**64 - 1
TWO = [("a", (4, 2), F32, 0), ("b", (32,), Q8_0, 32)]


def whole() -> Raw:
    return Raw({"general.architecture": "llama", "n": 3, "names": ["a", "b"]}, TWO, bytes(96))


def read(raw: bytes) -> Header:
    return parse(raw, len(raw), FILE)


def refusal(raw: bytes) -> str:
    with pytest.raises(JobError) as caught:
        read(raw)
    assert caught.value.code == "unsupported_model"
    assert caught.value.message.startswith("m.gguf ")
    return caught.value.message


def test_a_header_is_read() -> None:
    found = read(whole().bytes())
    assert found.metadata == {"general.architecture": "llama", "n": 3, "names": ["a", "b"]}
    a, b = found.tensors["a"], found.tensors["b"]
    assert (a.shape, a.end - a.begin) == ((2, 4), 32)
    assert (b.shape, b.end - b.begin, b.begin - a.begin) == ((32,), 34, 32)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"magic": b"PK\x03\x04"}, "is not a GGUF file: it begins with b'PK"),
        ({"magic": b""}, "is not a GGUF file"),
        ({"version": 1}, "is a GGUF file of version 1; supported: 2 and 3"),
        ({"version": 4}, "is a GGUF file of version 4; supported: 2 and 3"),
        ({"order": ">"}, "is a big-endian GGUF file; only little-endian ones are supported"),
        ({"tensor_count": MOST}, f"its header states {MOST} tensors, and has"),
        ({"pair_count": MOST}, f"its header states {MOST} metadata entries, and has"),
        ({"tensors": [("a", (4,), 99, 0)]}, "stores tensor a with type 99; supported: F32, F16"),
        ({"tensors": [("a", (4,), 9, 0)]}, "stores tensor a with type Q8_1 (9); supported: F32"),
        ({"tensors": [("a", (31,), Q8_0, 0)]}, "tensor a has rows of 31 values, which Q8_0"),
        ({"tensors": [("a", (4,), F32, 4)]}, "tensor a is not aligned to 32 bytes"),
        ({"tensors": [("a", (400,), F32, 0)]}, "it is truncated: tensor a ends at byte"),
        ({"tensors": [("a", (4,), F32, 2**62)]}, "it is truncated: tensor a ends at byte"),
        ({"tensors": [("a", (0,), F32, 0)]}, "tensor a has the impossible shape [0]"),
        ({"tensors": [("a", (), F32, 0)]}, "tensor a has the impossible shape []"),
        ({"tensors": [("a", (2**40, 2**40), F32, 0)]}, "tensor a has the impossible shape"),
        ({"tensors": [("a", (1,) * 5, F32, 0)]}, "tensor a has 5 dimensions; at most 4"),
        ({"tensors": [TWO[0], TWO[0]]}, "it has tensor a twice"),
        ({"tensors": [("a", (9,), F32, 0), TWO[1]]}, "the tensors a and b overlap"),
    ],
)
def test_damage_is_named(change: dict[str, Any], fact: str) -> None:
    raw = whole()
    for name, value in change.items():
        setattr(raw, name, value)
    assert fact in refusal(raw.bytes())


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        (struct.pack("<IQ", 8, MOST), "it is truncated: x ends beyond its"),
        (struct.pack("<IIQ", 9, 8, MOST), f"its header states {MOST} strings in x"),
        (struct.pack("<IIQ", 9, 4, 2**61), f"its header states {2**61} values in x"),
        (struct.pack("<IIQQ", 9, 8, 1, MOST), "it is truncated: x ends beyond its"),
        (struct.pack("<IIQ", 9, 9, 1), "x is an array of arrays"),
        (struct.pack("<I", 13), "the type of x is 13, which no version defines"),
        (struct.pack("<II", 9, 77), "the type of x is 77, which no version defines"),
        (struct.pack("<IQ", 8, 2) + b"\xff\xfe", "x is not UTF-8 text"),
    ],
)
def test_a_damaged_value_is_named(value: bytes, fact: str) -> None:
    raw = Raw({"x": value}, TWO, bytes(96))
    assert fact in refusal(raw.bytes())


@pytest.mark.parametrize("alignment", [0, 1, 4, 24, 2.0, "32"])
def test_an_impossible_alignment_is_named(alignment: Any) -> None:
    raw = Raw({"general.alignment": alignment}, TWO, bytes(96))
    assert "general.alignment must be a power of two of at least 8" in refusal(raw.bytes())


def test_another_alignment_is_followed() -> None:
    raw = Raw({"general.alignment": 8}, [("a", (2,), F32, 8)], bytes(16), alignment=8)
    tensor = read(raw.bytes()).tensors["a"]
    assert tensor.end == len(raw.bytes())


def test_a_key_that_is_there_twice_is_named() -> None:
    assert "its metadata has n twice" in refusal(whole().bytes([("n", 4)]))


def test_a_file_that_is_truncated_at_any_byte_is_refused() -> None:
    raw = whole().bytes()
    end = read(raw).tensors["b"].end
    for length in range(end):
        refusal(raw[:length])


def test_the_first_bytes_of_a_file_are_enough_or_more_are_asked_for() -> None:
    raw = whole().bytes()
    asked = set()
    for length in range(4, len(raw)):
        try:
            found = parse(raw[:length], len(raw), FILE)
            assert found.tensors == read(raw).tensors
        except Incomplete as incomplete:
            assert length < incomplete.needed <= len(raw)
            asked.add(length)
    assert asked == set(range(4, max(asked) + 1))


def test_a_header_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADER", 64)
    raw = whole().bytes()
    with pytest.raises(JobError, match="its header"):
        parse(raw[:60], len(raw), FILE)


def test_absurd_lengths_allocate_nothing() -> None:
    """The counts pass no check of a smaller file; the file states to have terabytes."""
    huge = 2**45
    for value in (
        struct.pack("<IIQ", 9, 8, 2**40),
        struct.pack("<IIQ", 9, 12, 2**40),
        struct.pack("<IQ", 8, 2**44),
    ):
        raw = Raw({"x": value}, TWO, bytes(96)).bytes()
        tracemalloc.start()
        with pytest.raises(JobError):
            parse(raw, huge, FILE)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def test_mutated_headers_are_refused_or_read() -> None:
    """2,000 headers with bytes changed, inserted or removed."""
    source, original = random.Random(5), whole().bytes()
    end = read(original).tensors["a"].begin
    refused = 0
    for _ in range(2000):
        raw = bytearray(original)
        for _ in range(source.randint(1, 4)):
            at = source.randrange(end)
            action = source.choice(("change", "insert", "remove", "long"))
            if action == "change":
                raw[at] = source.choice((0, 1, 127, 128, 255, source.randrange(256)))
            elif action == "insert":
                raw[at:at] = source.randbytes(source.randint(1, 9))
            elif action == "remove":
                del raw[at : at + source.randint(1, 9)]
            else:
                raw[at : at + 8] = struct.pack("<Q", source.choice((MOST, 2**63, 2**40, 2**31, 0)))
        try:
            found = read(bytes(raw))
        except JobError as error:
            assert error.code == "unsupported_model"
            refused += 1
        else:
            assert all(tensor.end <= len(raw) for tensor in found.tensors.values())
    assert refused > 1000
