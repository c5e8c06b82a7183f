"""Unfinished files of a run that take minutes to write, such as scores.

Each is locked while its writer lives, so that the next writer tells it from what a killed one has
left.
"""

from __future__ import annotations

import fcntl
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def unfinished(folder: Path, kind: str) -> Iterator[Path]:
    """An empty file in `folder`, to be written and renamed; removed if that fails. Files of its
    kind whose writers were killed are removed before. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for other in folder.glob(f"{kind}.*"):
        _remove_if_left(other)
    path, file = _make(folder, kind)
    with file:
        try:
            yield path
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _make(folder: Path, kind: str) -> tuple[Path, BinaryIO]:
    while True:
        path = folder / f"{kind}.{uuid.uuid4().hex}"
        file = path.open("wb")
        with suppress(OSError):  # a file system without locks: nothing is taken for left there
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():
            return path, file
        file.close()  # another writer has removed it before it was locked


def _remove_if_left(path: Path) -> None:
    with suppress(OSError), path.open("r+b") as file:  # its writer lives, or it is gone
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
