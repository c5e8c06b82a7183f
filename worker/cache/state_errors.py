"""Errors of state files that can't be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs.errors import InvalidRequest


class Damaged(InvalidRequest):
    """A file is truncated or changed, or no safetensors file at all: `fact`."""

    def __init__(self, path: Path, fact: str) -> None:
        sentence = f"{path} can't be used as a prompt cache: {fact}; save it again"
        super().__init__("invalid_request", sentence, "prompt_cache")
        self.path, self.fact = path, fact

    def __reduce__(self) -> tuple[Any, ...]:
        return (Damaged, (self.path, self.fact))


class Unreadable(InvalidRequest):
    """A file that may be whole can't be opened or read now."""

    def __init__(self, path: Path, error: OSError) -> None:
        fact = error.strerror or type(error).__name__
        sentence = f"{path} cannot be opened or read: {fact}"
        super().__init__("invalid_request", sentence, "prompt_cache")
        self.path, self.error = path, error

    def __reduce__(self) -> tuple[Any, ...]:
        return (Unreadable, (self.path, self.error))
