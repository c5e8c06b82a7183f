"""Token ids: the check of those that callers and files give, and parts of them without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from jobs.errors import invalid


def token_ids(values: Sequence[int], vocab: int, name: str) -> list[int]:
    """Returns `values` as a list of ints. Raises JobError unless all are ids of the vocabulary."""
    try:
        ids = [value.__index__() for value in values if not isinstance(value, bool)]
        valid = len(ids) == len(values)
    except (TypeError, AttributeError):
        valid = False
    if not valid:
        raise invalid(f"{name} must be token ids: a list of integers", name)
    for one in ids:
        if not 0 <= one < vocab:
            raise invalid(f"the vocabulary has {vocab} tokens, got id {one} in {name}", name)
    return ids


class TokenSlice(Sequence[int]):
    """Some consecutive ones of token ids that are shared with others, and must not change. Slices
    of it are lists."""

    __slots__ = ("_end", "_ids", "_start")
    _ids: Sequence[int]
    _start: int
    _end: int

    def __init__(self, ids: Sequence[int], start: int, end: int) -> None:
        """`start`, `end`: within `ids`."""
        whole, base = (ids._ids, ids._start) if isinstance(ids, TokenSlice) else (ids, 0)
        self._ids, self._start, self._end = whole, base + start, base + end

    def __len__(self) -> int:
        return self._end - self._start

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, end, step = index.indices(len(self))
            if step != 1:
                return [self[at] for at in range(start, end, step)]
            return list(self._ids[self._start + start : self._start + max(start, end)])
        length = len(self)
        if not -length <= index < length:
            raise IndexError(index)
        return self._ids[self._start + index % length]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]
