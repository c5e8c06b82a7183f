"""JSON as chatjobs writes it. Text may have lone surrogates: JSON can hold them, UTF-8 can't."""

from __future__ import annotations

import json
from typing import Any


def encodable(text: str) -> str:
    """`text` with lone surrogates escaped as `\\udXXX`."""
    return text.encode("utf-8", "backslashreplace").decode()


def to_json(value: Any) -> str:
    """Compact JSON that is valid UTF-8; lone surrogates become JSON escapes."""
    return encodable(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


class CompactJSON:
    """A serializer for RQ, whose own for JSON writes spaces and reads this as well."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        return to_json(value).encode()

    @staticmethod
    def loads(text: bytes) -> Any:
        return json.loads(text)
