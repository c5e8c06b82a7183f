"""The values of a request's fields before their types are checked: all are JSON within limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

# Serializers and parsers have limits of their own beyond these.
MAX_FIELD_DEPTH = 64  # levels of nested lists and objects in one field
MAX_BITS = 1024  # of an integer

# Requests have many values, and exact types are found faster than abstract ones.
_PLAIN = frozenset({str, int, float, bool, dict, list, type(None)})
_UNLIMITED = frozenset({str, bool, type(None)})
_CONTAINERS = (dict, list, tuple)


def as_list(value: Any) -> Any:
    """Python's other collections, such as a generator of messages, as a list."""
    if type(value) in _PLAIN:
        return value
    other = isinstance(value, Iterable) and not isinstance(
        value, str | bytes | bytearray | Mapping | BaseModel
    )
    return list(value) if other else value


def check_json(value: Any, field: str, depth: int = MAX_FIELD_DEPTH) -> None:
    """Raises ValueError for more than `depth` levels of nesting, a huge integer, or a number that
    is not finite."""
    if type(value) in _UNLIMITED:
        return
    if isinstance(value, _CONTAINERS):
        if not depth:
            raise ValueError(f"{field} is nested deeper than {MAX_FIELD_DEPTH} levels")
        for item in value.values() if isinstance(value, dict) else value:
            if type(item) not in _UNLIMITED:  # a call takes longer than the look
                check_json(item, field, depth - 1)
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"{field} contains an integer of more than {MAX_BITS} bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{field} contains {value}: numbers must be finite")
