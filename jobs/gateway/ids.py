"""Ids of files and batches. They sort by creation, and no part of one is chosen by a client."""

from __future__ import annotations

import re
import secrets
import time

FILE = "file-"
BATCH = "batch_"
_END = "[0-9a-f]{28}"


def new_id(kind: str) -> str:
    """An id that is not taken: the milliseconds of now, and 64 random bits."""
    return f"{kind}{int(1000 * time.time()):012x}{secrets.token_hex(8)}"


def is_id(kind: str, text: object) -> bool:
    """True for an id of this kind. Paths are made of such only."""
    return isinstance(text, str) and re.fullmatch(kind + _END, text) is not None


def pattern(kind: str) -> str:
    """The pattern in JSON Schema of the ids of this kind."""
    return f"^{kind}{_END}$"
