"""The results folder of one Redis: all its workers must write to the same one.

The folder holds an id in a file, and Redis holds the id of the folder that its workers write to. So
a folder is recognised on every machine that mounts it, whatever its path is there.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import redis

from jobs import keys, lua
from jobs.client.damage import is_damage
from jobs.errors import JobError

ID_FILE = ".chatjobs-id"

FOLDER = lua.load("worker.record", "folder")


# KEYS and ARGV of the script, by name and in order.


class FolderKeys(NamedTuple):
    results: str


class FolderArgs(NamedTuple):
    folder: str


def check_folder(root: Path) -> None:
    """Raise JobError unless files can be written to the results folder."""
    probe = root / f".probe-{uuid.uuid4().hex}"  # in containers, all workers have one pid
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise JobError(
            "internal",
            f"the results folder {root} can't be written ({error.strerror}): choose another one "
            "with --results, or give this user write permission",
        ) from None


def claim_folder(client: redis.Redis, root: Path) -> None:
    """Make `root` the results folder of this Redis. Raises JobError if it has another one."""
    mine = {"id": folder_id(root), "host": socket.gethostname(), "path": str(root.absolute())}
    note = client.register_script(FOLDER)
    if note(keys=FolderKeys(keys.RESULTS), args=FolderArgs(json.dumps(mine))):
        return
    theirs = _read_folder(client) or {}
    if theirs.get("id") == mine["id"]:
        return
    raise JobError(
        "internal",
        f"the results folder {mine['path']} on {mine['host']} is not the one of the other workers "
        f"on this Redis, {theirs.get('path')} on {theirs.get('host')}, and a run must not be "
        "split: give that folder with --results (on a disk that all workers share), or --no-record "
        "to leave the rows to the others; to change the folder, stop all workers and delete the "
        f"key {keys.RESULTS} in Redis",
    )


def _read_folder(client: redis.Redis) -> dict[str, Any] | None:
    """The results folder of this Redis; None if it has none yet. Raises JobError for a value that
    no worker has written."""
    try:
        found = client.get(keys.RESULTS)
        folder = None if found is None else json.loads(found)
    except (redis.ResponseError, ValueError, RecursionError) as error:
        if isinstance(error, redis.ResponseError) and not is_damage(error):
            raise
        folder = error
    if folder is None or (isinstance(folder, dict) and isinstance(folder.get("id"), str)):
        return folder
    raise JobError(
        "internal",
        f"the key {keys.RESULTS} in Redis does not hold the results folder of the workers, because "
        "another program has written it: stop all workers, delete it, and start them with the "
        "folder that they had",
    )


def folder_id(root: Path) -> str:
    """The id of a results folder, made if it has none. Raises OSError."""
    file = root / ID_FILE
    if not file.exists():
        new = root / f"{ID_FILE}-{uuid.uuid4().hex}"
        new.write_text(uuid.uuid4().hex + "\n")
        try:
            os.link(new, file)  # fails if another worker was faster
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            new.replace(file)
        new.unlink(missing_ok=True)
    return file.read_text().strip()
