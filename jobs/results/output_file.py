"""Files that commands write where the user says: one appears when it is complete, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from jobs.disk import part_of
from jobs.disk_faults import is_full
from jobs.errors import invalid


def check_output(path: Path) -> None:
    """Raise InvalidRequest for a path that can't be written to."""
    if path.exists() and not path.is_file():
        raise invalid(f"{path} can't be written: it is no regular file", "output")
    if not path.parent.is_dir():
        raise invalid(f"{path} can't be written: there is no folder {path.parent}", "output")


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """An OSError of a full disk gets the path of the file: a write knows none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or not is_full(error):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def replaced(path: Path) -> Iterator[IO[str]]:
    """A file that takes the place of `path` at the end, unless an error is raised. An OSError of a
    full disk has the path."""
    with replaced_together([path]) as (file,):
        yield file


@contextmanager
def replaced_together(paths: Sequence[Path]) -> Iterator[Sequence[IO[str]]]:
    """Files that take the places of `paths` at the end, unless an error is raised. The first of
    several is removed before the others are replaced, and replaced last: if it exists, the others
    belong to it."""
    parts = [part_of(path) for path in paths]
    try:
        with full_disk_named(paths[0]), ExitStack() as opened:
            files = [
                opened.enter_context(part.open("w", encoding="utf-8", newline="")) for part in parts
            ]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        if len(paths) > 1:
            paths[0].unlink(missing_ok=True)
        for part, path in reversed([*zip(parts, paths, strict=True)]):
            part.replace(path)
    finally:
        for part in parts:
            with suppress(OSError):
                part.unlink()
