"""The results folder of one Redis: all its workers must write to the same one.

The folder holds an id in a file, and Redis holds the id of the folder that its workers write to. So
a folder is recognised on every machine that mounts it, whatever its path is there. A recorder
checks the id around every file that it writes: the folder may be moved, deleted or unmounted.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path

import redis

from jobs import keys
from jobs.disk_faults import FolderLost, explain, is_full
from jobs.errors import JobError
from jobs.store.results_folder import (
    ID_FILE,
    FolderRecord,
    add_record,
    read_id,
    read_record,
    replace_record,
)

logger = logging.getLogger(__name__)

PROBE_BYTES = 4096


class ResultsFolder:
    """The folder that a worker has claimed. `check` it before a file, and before it counts."""

    def __init__(self, root: Path, folder_id: str) -> None:
        self.root, self._id = root.absolute(), folder_id
        found = (root / ID_FILE).stat()
        self._device, self._inode = found.st_dev, found.st_ino

    def check(self) -> None:
        """Raise FolderLost unless this folder is at its path, and OSError if that can't be read."""
        file = self.root / ID_FILE
        found = read_id(self.root)
        if found is None:
            raise FolderLost(
                f"the results folder {self.root} has no file {ID_FILE}: it was moved or deleted, "
                "or its disk is not mounted: mount the disk or put the folder back; if it was "
                "deleted for good, restart one worker, which makes it anew for all"
            )
        if found != self._id:
            raise FolderLost(
                f"{self.root} is another folder than the one that this worker began with (its "
                f"{ID_FILE} differs): mount the disk or put the folder back that was there"
            )
        place = file.stat()
        if place.st_dev != self._device and place.st_ino != self._inode:
            raise FolderLost(
                f"{self.root} is a copy on another disk of the results folder that this worker "
                "began with: mount the first disk there, or restart the workers to go on in the "
                "copy"
            )

    def probe(self) -> None:
        """Raise OSError unless this folder is at its path, and files can be written there."""
        self.check()
        _probe(self.root)


def claim_folder(client: redis.Redis, root: Path) -> ResultsFolder:
    """Make `root` the results folder of this Redis. Raises JobError if it has another one, or if
    files can't be written there."""
    root = root.absolute()
    theirs = read_record(client)
    if theirs is not None:
        _refuse_another(theirs, root)
    try:
        _check_writable(root)
        folder_id = _make_id(root, theirs.id if theirs else uuid.uuid4().hex)
        device = root.stat().st_dev
    except OSError as error:
        raise _unusable(root, error) from None
    mine = FolderRecord(folder_id, socket.gethostname(), str(root), device)
    if theirs is not None:
        if mine != theirs and _is_same_place(mine, theirs):
            with suppress(redis.exceptions.OutOfMemoryError):  # the device has another number now
                replace_record(client, mine)
    elif not add_record(client, mine):
        theirs = read_record(client)
        if theirs is not None:
            _refuse_another(theirs, root)
    return ResultsFolder(root, folder_id)


def _check_writable(root: Path) -> None:
    """Raise OSError unless files can be written to the folder, which is made if it is absent. A
    full disk is only logged: a worker on it answers jobs, and their rows wait."""
    root.mkdir(parents=True, exist_ok=True)
    try:
        _probe(root)
    except OSError as error:
        if not is_full(error):
            raise
        logger.warning("rows can't be written now, and wait in Redis: %s", explain(error, root))


def _probe(root: Path) -> None:
    file = root / f".probe-{uuid.uuid4().hex}"  # in containers, all workers have one pid
    try:
        file.write_bytes(bytes(PROBE_BYTES))
    finally:
        file.unlink(missing_ok=True)


def _refuse_another(theirs: FolderRecord, root: Path) -> None:
    """Raise JobError unless `root` is the folder of this Redis, or is at its place, on its disk,
    and has lost its id: somebody has deleted or moved it, and it can begin anew."""
    path, host = str(root), socket.gethostname()
    try:
        mine = read_id(root)
        device = _nearest(root).stat().st_dev
    except OSError as error:
        raise _unusable(root, error) from None
    if mine == theirs.id:
        return
    same_place = _is_same_place(theirs, FolderRecord("", host, path))
    change = f"stop all workers and delete the key {keys.RESULTS} in Redis"
    if mine is None and same_place:
        if device == theirs.device:
            logger.warning(
                "the results folder %s was deleted, moved or emptied: it begins anew, and the rows "
                "that were in it are not there",
                path,
            )
            return
        raise JobError(
            "internal",
            f"the results folder {path} is not the one that workers of this Redis wrote to: it "
            f"has no file {ID_FILE} and is on another disk: mount the disk that was there; if its "
            f"rows are gone for good, {change}",
        )
    raise JobError(
        "internal",
        f"the results folder {path} on {host} is not the one of the other workers on this Redis, "
        f"{theirs.path} on {theirs.host}, and a run must not be split: give that folder with "
        "--results (on a disk that all workers share), or --no-record to leave the rows to the "
        f"others; to change the folder, {change}",
    )


def _is_same_place(one: FolderRecord, other: FolderRecord) -> bool:
    return (one.host, one.path) == (other.host, other.path)


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _unusable(root: Path, error: OSError) -> JobError:
    return JobError(
        "internal",
        f"the results folder {root} can't be used ({explain(error, root)}): give another one with "
        "--results, if this one can't be mended",
    )


def _make_id(root: Path, wanted: str) -> str:
    """The id of a folder; `wanted` if it has none. Raises OSError."""
    if (found := read_id(root)) is not None:
        return found
    file, new = root / ID_FILE, root / f"{ID_FILE}-{uuid.uuid4().hex}"
    try:
        with new.open("w") as opened:
            opened.write(wanted + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        try:
            os.link(new, file)  # fails if another worker was faster
        except FileExistsError:
            if read_id(root) is None:  # it is empty
                new.replace(file)
        except OSError:  # a file system without hard links
            new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    return read_id(root) or wanted
