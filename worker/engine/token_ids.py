"""Checks the token ids that callers and files give."""

from __future__ import annotations

from collections.abc import Sequence

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
