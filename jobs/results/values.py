"""Any JSON value → a value that fits its column, or null."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any


def as_object(value: Any) -> dict[str, Any]:
    """`value` if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_objects(value: Any) -> list[dict[str, Any]]:
    """The objects in a list; anything else is dropped."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def item_at(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list) and index < len(value) else None


def length_of(value: Any) -> int | None:
    return len(value) if isinstance(value, list) and value else None


def as_text(value: Any) -> str | None:
    """Lone surrogates, which Parquet cannot hold, become question marks."""
    if not isinstance(value, str) or value.isascii():
        return value if isinstance(value, str) else None
    return value.encode("utf-8", "replace").decode()


def as_texts(value: Any) -> list[str] | None:
    """The strings in a list; anything else is dropped."""
    if not isinstance(value, list):
        return None
    return [item for item in map(as_text, value) if item is not None]


def as_int(value: Any, bits: int) -> int | None:
    """Clamped to the range of a signed integer of `bits` bits."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    limit: int = 2 ** (bits - 1)
    return max(-limit, min(limit - 1, value))


def as_bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def as_ints(value: Any) -> list[int | None] | None:
    if not isinstance(value, list):
        return None
    if value and {*map(type, value)} == {int} and -(2**31) <= min(value) <= max(value) < 2**31:
        return value  # token ids: the longest lists, and they fit
    return [as_int(item, 32) for item in value]


def as_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def as_floats(value: Any) -> list[float | None] | None:
    return [as_float(item) for item in value] if isinstance(value, list) else None


def as_json(value: Any) -> str | None:
    """JSON text of a value; null stays null."""
    return None if value is None else as_text(json.dumps(value, ensure_ascii=False))


def as_time(seconds: float | None) -> datetime | None:
    """Seconds since the epoch as a time in UTC."""
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def seconds_between(start: float | None, end: float | None) -> float | None:
    """The duration; 0 if the clocks of two machines, which differ, say that it ended before."""
    return None if start is None or end is None else max(0.0, end - start)
