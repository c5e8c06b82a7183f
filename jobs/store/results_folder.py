"""The results folder that the workers of one Redis share: its id, in a file there and in Redis.

Workers claim it (`jobs/record/folder.py`); the command line compares a folder with it. Owns the
key in Redis.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import redis

from jobs import keys, lua
from jobs.errors import JobError
from jobs.store.connection.protocol import Steps, command, retry
from jobs.store.damage import Damaged

ID_FILE = ".chatjobs-id"
ID_BYTES = 100  # of the file, at most


FOLDER = lua.load("jobs.store", "results_folder")


# KEYS and ARGV of results_folder.lua, by name and in order.


class FolderKeys(NamedTuple):
    results: str


class FolderArgs(NamedTuple):
    folder: str


@dataclass(frozen=True, slots=True)
class FolderRecord:
    """The folder's record in Redis: its id, and where the first worker had it.

    device: number of the file system on that host; None if an older version has written it.
    """

    id: str
    host: str
    path: str
    device: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read_record(client: redis.Redis) -> FolderRecord | None:
    """The results folder of this Redis; None if it has none yet. Raises JobError for a value that
    no worker has written."""
    found: Any
    try:
        found = client.get(keys.RESULTS)
    except Damaged:
        found = b""
    return _record_in(found)


def record_as_steps(deadline: float | None) -> Steps[FolderRecord | None]:
    """`read_record` for any connection. An outage is waited out until `deadline`."""
    return _record_in((yield from retry(command("get", keys.RESULTS), deadline)))


def _record_in(found: Any) -> FolderRecord | None:
    if found is None:
        return None
    record: Any = None
    with suppress(ValueError, RecursionError):
        record = json.loads(found)
    if isinstance(record, dict) and isinstance(record.get("id"), str):
        device = record.get("device")
        return FolderRecord(
            record["id"],
            str(record.get("host")),
            str(record.get("path")),
            device if isinstance(device, int) else None,
        )
    raise JobError(
        "internal",
        f"the key {keys.RESULTS} in Redis does not hold the results folder of the workers, because "
        "another program has written it: stop all workers, delete it, and start them with the "
        "folder that they had",
    )


def add_record(client: redis.Redis, record: FolderRecord) -> bool:
    """Write the record of this Redis. False if there is one already."""
    script = client.register_script(FOLDER)
    return bool(script(keys=FolderKeys(keys.RESULTS), args=FolderArgs(record.to_json())))


def replace_record(client: redis.Redis, record: FolderRecord) -> None:
    """Write the record of the same folder anew."""
    client.set(keys.RESULTS, record.to_json())


def delete_record(client: redis.Redis) -> None:
    """Let the next worker choose the folder."""
    client.delete(keys.RESULTS)


def read_id(root: Path) -> str | None:
    """The id in a folder; None if it has none, or an empty file, as a power cut may leave. Raises
    OSError if the file can't be read."""
    try:
        with (root / ID_FILE).open("rb") as file:
            return file.read(ID_BYTES).decode(errors="replace").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
