"""Folders that appear whole: each is filled in a folder for unfinished ones, and renamed.

    <results>/.files/<tenant>/<id>/      a file
    <results>/.batches/<tenant>/<id>/    a batch
    …/<tenant>/_tmp/                     unfinished ones, and those that are being removed

A reader of results takes none of them for a run. Any number of gateways use the same folders.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from jobs.disk import make_folder, sync_folder
from jobs.disk_faults import explain, is_full
from jobs.encoding import from_json, to_json
from jobs.gateway.failures import HttpError

logger = logging.getLogger(__name__)

UNFINISHED = "_tmp"
WITHOUT_KEYS = "without.keys"  # instead of a tenant's name, which has no "."
LEFT_SECONDS = 60.0  # an unfinished folder that nobody has locked is older, or just made
TAKEN = (errno.EEXIST, errno.ENOTEMPTY)

P = ParamSpec("P")
T = TypeVar("T")


async def on_disk(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function of files in a thread. Raises HttpError if the disk does not take or give
    them."""
    try:
        return await asyncio.to_thread(call, *args, **kwargs)
    except OSError as error:
        raise disk_fault(error) from None


def disk_fault(error: OSError) -> HttpError:
    """The reply for a disk that fails, whose log has the path."""
    logger.error("a request failed: %s", explain(error, Path()))
    headers = {"x-should-retry": "false"}
    if is_full(error):
        return HttpError(
            507,
            "the disk of the server is full: ask its operator for room",
            "insufficient_storage",
            headers=headers,
        )
    return HttpError(
        500,
        "the disk of the server can't be used, and the log of the gateway has the reason",
        "internal",
        headers=headers,
    )


def tenant_folder(results: Path, area: str, tenant: str | None) -> Path:
    """The folder of a tenant in one area, such as `.files`."""
    return results.absolute() / area / (tenant or WITHOUT_KEYS)


@contextmanager
def unfinished_folder(parent: Path) -> Iterator[Path]:
    """An empty folder that `publish` renames, or that is removed. Raises OSError."""
    path = parent / UNFINISHED / uuid.uuid4().hex
    make_folder(path.parent)
    path.mkdir()
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: nothing is taken for left there
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(handle)
        shutil.rmtree(path, ignore_errors=True)


def publish(path: Path, final: Path) -> bool:
    """Let an unfinished folder appear, durably. False if there is one of this name: it stays."""
    sync_folder(path)
    try:
        path.rename(final)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        return False
    sync_folder(final.parent)
    return True


def remove(folder: Path) -> bool:
    """Remove a folder: for readers at once. False if it is gone."""
    gone = folder.parent / UNFINISHED / uuid.uuid4().hex
    make_folder(gone.parent)
    try:
        folder.rename(gone)
    except FileNotFoundError:
        return False
    sync_folder(folder.parent)
    shutil.rmtree(gone, ignore_errors=True)
    return True


def remove_left(parent: Path) -> None:
    """Remove the unfinished folders of processes that were killed."""
    for path in _listed(parent / UNFINISHED):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - path.stat().st_mtime > LEFT_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def names_in(parent: Path) -> list[str]:
    """The names in a folder, sorted; none if there is no folder."""
    return sorted(path.name for path in _listed(parent))


def write_json(file: Path, content: Any) -> None:
    """Write a file that is not there, durably. Raises OSError."""
    write_bytes(file, to_json(content).encode() + b"\n")


def write_bytes(file: Path, content: bytes) -> None:
    with file.open("xb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def create_json(file: Path, content: Any) -> bool:
    """Let a file appear whole and durably. False if it is there: it stays. Raises OSError."""
    part = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        write_json(part, content)
        try:
            os.link(part, file)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            if file.exists():
                return False
            part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(file.parent)
    return True


def read_json(file: Path, kinds: Mapping[str, Any]) -> dict[str, Any] | None:
    """The object in a file; None if there is none, or if it was damaged, which is logged. `kinds`:
    the types of the fields that it must have."""
    try:
        content = from_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not all(
        isinstance(content.get(name), kind) for name, kind in kinds.items()
    ):
        logger.error("%s is damaged, and is ignored: restore it, or remove its folder", file)
        return None
    return content


@contextmanager
def locked(parent: Path) -> Iterator[None]:
    """One process at a time changes what a folder has in all. Raises OSError."""
    make_folder(parent)
    handle = os.open(parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _listed(parent: Path) -> list[Path]:
    try:
        return list(parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
