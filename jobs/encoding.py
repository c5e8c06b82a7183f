"""JSON as chatjobs writes and reads it. Text may have lone surrogates: JSON can hold them, UTF-8
can't.

pydantic_core takes a third of the time of the standard library's json or less, but has narrower
limits: no lone surrogates, 200 levels. Where it refuses a value, json decides.
"""

from __future__ import annotations

import json
from typing import Any

import pydantic_core


def encodable(text: str) -> str:
    """`text` with lone surrogates escaped as `\\udXXX`."""
    return text.encode("utf-8", "backslashreplace").decode()


def to_json(value: Any) -> str:
    """Compact JSON that is valid UTF-8; lone surrogates become JSON escapes. Raises what json.dumps
    raises."""
    try:
        return pydantic_core.to_json(value).decode()
    except ValueError:
        return encodable(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def from_json(text: str | bytes) -> Any:
    """The value of JSON text. Raises what json.loads raises."""
    try:
        return pydantic_core.from_json(text)
    except ValueError:
        return json.loads(text)


class CompactJSON:
    """A serializer for RQ, whose own for JSON writes spaces and reads this as well."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        return to_json(value).encode()

    @staticmethod
    def loads(text: bytes) -> Any:
        return from_json(text)
