"""Compares the files that the hub library has downloaded with the hashes that the hub gives.

The library compares lengths alone. It names each file of its cache, `blobs/<ETag>`, by what the hub
calls it: the sha256 of a large file (LFS, Xet), the id that git gives to any other, which is a
sha1. Some mirrors give a plain sha1. A name of another form, and a cache without symbolic links,
which has no such names, can't be compared.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from huggingface_hub.utils.tqdm import tqdm

logger = logging.getLogger(__name__)

SHA1, SHA256 = re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{64}")
CHUNK_BYTES = 2**20
SHOWN_BYTES = 10_000_000  # files that take longer have a progress bar
RECORD = "chatjobs-unchecked.json"


def complete_in(repository: Path) -> set[str]:
    """The names of the complete files in the cache of a repository."""
    try:
        found = [path.name for path in (repository / "blobs").iterdir()]
    except OSError:  # there is none, or the download will say why
        return set()
    return {name for name in found if SHA1.fullmatch(name) or SHA256.fullmatch(name)}


def delete_damaged(repository: Path, names: Iterable[str]) -> Sequence[str]:
    """Compare these files with their names, and delete those that differ. Returns how the commits
    call them."""
    blobs = [repository / "blobs" / name for name in names]
    total = sum(blob.stat().st_size for blob in blobs)
    hides = True if total < SHOWN_BYTES else None  # None: unless the library's bars are off
    bar = {"unit": "B", "unit_scale": True, "desc": "Comparing hashes"}
    with tqdm(total=total, disable=hides, **bar) as progress:  # type: ignore[no-untyped-call]
        damaged = [blob for blob in blobs if not _is_intact(blob, progress)]
    return sorted(name for blob in damaged for name in _delete(repository, blob))


def is_unchecked(folder: Path, files: Iterable[Path]) -> bool:
    """True if files of a commit were downloaded by a process that was killed, or that has not
    compared them yet. `folder`: that of the commit."""
    before = _recorded(folder.parent.parent)
    return before is not None and any(_blob_of(file) not in before for file in files)


class Unchecked:
    """The files of a repository that were complete before a download, on the disk until those that
    have come since are compared: if this process is killed, the next one compares what it left. A
    context manager; one process at a time has it."""

    def __init__(self, repository: Path) -> None:
        repository.mkdir(parents=True, exist_ok=True)
        self._repository = repository
        self._file = (repository / RECORD).open("a", encoding="utf-8")
        try:
            self._begin()
        except BaseException:
            with suppress(OSError):  # the disk is full
                self._file.close()
            raise

    def _begin(self) -> None:
        with suppress(OSError):  # a file system without locks: the library has its own
            self._lock()
        recorded = _recorded(self._repository)
        self._before = complete_in(self._repository) if recorded is None else recorded
        if recorded is None:
            json.dump(sorted(self._before), self._file)
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def delete_damaged(self) -> Sequence[str]:
        """Compare what has come; see the function. From now on nothing is unchecked."""
        damaged = delete_damaged(self._repository, complete_in(self._repository) - self._before)
        self._file.truncate(0)
        return damaged

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that downloads to %s", self._repository)
            fcntl.flock(self._file, fcntl.LOCK_EX)


def _recorded(repository: Path) -> set[str] | None:
    """What was complete before a download that is not compared yet; None if there is none."""
    try:
        text = (repository / RECORD).read_text(encoding="utf-8")
        return set(json.loads(text)) if text else None
    except OSError:
        return None
    except ValueError:  # its process was killed while it wrote
        return set()


def _blob_of(file: Path) -> str:
    """What the cache calls a file of a commit."""
    return file.readlink().name if file.is_symlink() else ""


def _is_intact(blob: Path, progress: tqdm) -> bool:
    """Compare a file with its name; it is read in pieces."""
    with blob.open("rb") as file:
        size = blob.stat().st_size
        hashes = [hashlib.sha256()]
        if SHA1.fullmatch(blob.name):
            hashes = [hashlib.sha1(f"blob {size}\0".encode()), hashlib.sha1()]
        while chunk := file.read(CHUNK_BYTES):
            for one in hashes:
                one.update(chunk)
            progress.update(len(chunk))
    return blob.name in [one.hexdigest() for one in hashes]


def _delete(repository: Path, blob: Path) -> list[str]:
    """Delete a file, and the links that commits have to it; returns their names."""
    content, commits = blob.resolve(), repository / "snapshots"
    links = [path for path in commits.rglob("*") if path.is_symlink() and path.resolve() == content]
    for path in (*links, content, blob):
        path.unlink(missing_ok=True)
    return [str(Path(*path.relative_to(commits).parts[1:])) for path in links] or [blob.name]
