"""Unfinished files of a run: each is written in the run's folder TEMPORARY, and renamed when it is
complete.

One that takes minutes to write, such as scores, is locked while its writer lives, so that the next
writer tells it from what a killed one has left. A text is written again if another writer has taken
it for that.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from jobs.disk import make_folder, sync_folder

TEMPORARY = "_tmp"


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


def write_text(folder: Path, name: str, text: str) -> None:
    """Replace a file of a run atomically, and remove what writers of it left that were killed."""
    temporary = folder / TEMPORARY / f"{name}.{uuid.uuid4().hex}"
    while True:
        make_folder(temporary.parent)
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)  # incomplete: the disk is full
            raise
        try:
            temporary.replace(folder / name)
            break
        except FileNotFoundError:
            pass  # another writer of the file took it for what a killed one left
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    for leftover in temporary.parent.glob(f"{name}.*"):
        leftover.unlink(missing_ok=True)
    sync_folder(folder)


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
