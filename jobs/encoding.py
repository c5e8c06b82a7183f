"""Text and JSON that UTF-8 can hold, whatever a request contained."""

from __future__ import annotations

import json
from typing import Any


def encodable(text: str) -> str:
    """`text` with lone surrogates escaped as `\\udXXX`: UTF-8 has no form for them."""
    return text.encode("utf-8", "backslashreplace").decode()


def to_json(value: Any) -> str:
    """Compact JSON that is valid UTF-8; lone surrogates become JSON escapes."""
    return encodable(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
