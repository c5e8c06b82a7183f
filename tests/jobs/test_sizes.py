"""Counts and numbers of bytes in messages."""

from __future__ import annotations

import pytest

from jobs.sizes import counted, size_text, size_texts


def test_only_one_thing_is_singular() -> None:
    assert [counted(count, "row") for count in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (2000, "2.0 kB"),
        (50_000, "50.0 kB"),
        (2**24, "16.8 MB"),
    ],
)
def test_a_size_has_the_unit_that_fits(count: int, text: str) -> None:
    assert size_text(count) == text


def test_sizes_that_differ_look_different() -> None:
    assert size_texts(2**24 + 1, 2**24) == ("16777217 bytes", "16777216 bytes")
    assert size_texts(5000, 2000) == ("5.0 kB", "2.0 kB")
