"""Files that commands write where the user says: one appears when it is complete, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from jobs.errors import invalid


def check_output(path: Path) -> None:
    """Raise InvalidRequest for a path that can't be written to."""
    if path.exists() and not path.is_file():
        raise invalid(f"{path} can't be written: it is no regular file", "output")
    if not path.parent.is_dir():
        raise invalid(f"{path} can't be written: there is no folder {path.parent}", "output")


@contextmanager
def replaced(path: Path) -> Iterator[IO[str]]:
    """A file that takes the place of `path` at the end, unless an error is raised."""
    part = part_of(path)
    try:
        with part.open("w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


def part_of(path: Path) -> Path:
    """The unfinished file beside `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")
