"""Functions that make changes of folders durable, and the names of unfinished files."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make renames in the folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Create the folder and its parents durably: each new entry is synced."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        sync_folder(new.parent)


def part_of(path: Path) -> Path:
    """A name for an unfinished file beside `path`, another one each time: in containers that share
    a folder, all processes may have one pid."""
    return path.parent / f".{path.name}.{uuid.uuid4().hex}.part"
