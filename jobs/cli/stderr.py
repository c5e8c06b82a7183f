"""Keeps a worker alive whose log can't be written: a full disk, or a reader that is gone."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, TextIO, cast


class LossyStream:
    """A text stream that drops what can't be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_writing() -> None:
    """From now on drop what can't be written to stderr, instead of failing."""
    if not isinstance(sys.stderr, LossyStream):
        sys.stderr = cast(TextIO, LossyStream(sys.stderr))
