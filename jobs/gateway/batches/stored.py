"""The batches of a tenant on the results disk. A batch is a folder with a file for each fact, which
is written once: so no gateway, however late, takes a fact back.

    batch.json          what the client asks for
    input.jsonl         its input, a hard link: the uploaded file may be deleted
    in_progress.json    the input is valid: number of its lines, model
    cancelling.json     the client does not want the rest
    finalizing.json     no row is on its way: how it ends, and the ids of its files
    ended.json          the end: counts, usage, errors
    progress.json       counts until then, replaced by the process that runs it
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from jobs.disk import part_of
from jobs.encoding import to_json
from jobs.errors import JobError
from jobs.gateway.failures import HttpError
from jobs.gateway.folders import (
    WITHOUT_KEYS,
    create_json,
    locked,
    names_in,
    publish,
    read_json,
    remove,
    remove_left,
    tenant_folder,
    unfinished_folder,
    write_json,
)
from jobs.gateway.ids import BATCH, is_id, new_id
from jobs.gateway.paging import Page, select

AREA = ".batches"
ASKED = "batch.json"
INPUT = "input.jsonl"
IN_PROGRESS = "in_progress.json"
CANCELLING = "cancelling.json"
FINALIZING = "finalizing.json"
ENDED = "ended.json"
PROGRESS = "progress.json"

# The fields of each, with their types.
KINDS: Mapping[str, Mapping[str, Any]] = {
    ASKED: {
        **dict.fromkeys(("endpoint", "input_file_id", "completion_window"), str),
        **dict.fromkeys(("created_at", "expires_at", "output_seconds"), int),
    },
    IN_PROGRESS: {"at": int, "total": int},
    CANCELLING: {"at": int},
    FINALIZING: {
        **{"at": int, "faults": list},
        **dict.fromkeys(("outcome", "output_file_id", "error_file_id"), str),
    },
    ENDED: {"at": int, "status": str},
    PROGRESS: {"completed": int, "failed": int},
}

KEPT_SECONDS = 30 * 24 * 3600  # after its end

Outcome = Literal["completed", "failed", "expired", "cancelled"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks for. Times are seconds since the epoch. `output_seconds`: until its files
    expire."""

    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None
    output_seconds: int


class StoredBatch:
    """One batch. `tenant`: None without keys. Methods raise OSError."""

    def __init__(self, folder: Path, tenant: str | None) -> None:
        self.folder, self.id, self.tenant = folder, folder.name, tenant
        self.run = self.id if tenant is None else f"{tenant}.{self.id}"
        self.input = folder / INPUT

    @cached_property
    def asked(self) -> Asked:
        """Raises JobError if it was damaged."""
        content = self.known(ASKED)
        return Asked(**{name: content.get(name) for name in Asked.__slots__})  # type: ignore[arg-type]

    def fact(self, name: str) -> dict[str, Any] | None:
        return read_json(self.folder / name, KINDS[name])

    def known(self, name: str) -> dict[str, Any]:
        """A fact that has been written. Raises JobError if it was damaged."""
        content = self.fact(name)
        if content is None:
            raise JobError("internal", f"{self.folder / name} is damaged")
        return content

    def note(self, name: str, **content: Any) -> bool:
        """Write a fact with the time. False if it is there already: it stays."""
        return create_json(self.folder / name, {"at": int(time.time()), **content})

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def show_progress(self, completed: int, failed: int) -> None:
        """For clients: it may be lost."""
        part = part_of(self.folder / PROGRESS)
        try:
            part.write_text(to_json({"completed": completed, "failed": failed}))
            part.replace(self.folder / PROGRESS)
        finally:
            part.unlink(missing_ok=True)

    @property
    def stops_as(self) -> Outcome | None:
        """How it ends if its rows do not end before; None: they go on."""
        if self.has(CANCELLING):
            return "cancelled"
        return "expired" if time.time() >= self.asked.expires_at else None

    def to_dict(self) -> dict[str, Any]:
        """The batch as OpenAI's API shows it."""
        ended, finalizing = self.fact(ENDED), self.fact(FINALIZING)
        cancelling, started = self.fact(CANCELLING), self.fact(IN_PROGRESS)
        if finalizing is not None and finalizing["outcome"] != "cancelled":
            cancelling = None  # it came too late
        status = "validating" if started is None else "in_progress"
        if finalizing is not None:
            status = "finalizing"
        if cancelling is not None:
            status = "cancelling"
        end = ended or {}
        if ended is not None:
            status = ended["status"]
        counts = end or self.fact(PROGRESS) or {}
        asked = self.asked
        found: dict[str, Any] = {
            "id": self.id,
            "object": "batch",
            "endpoint": asked.endpoint,
            "model": (started or {}).get("model"),
            "errors": end.get("errors"),
            "input_file_id": asked.input_file_id,
            "completion_window": asked.completion_window,
            "status": status,
            "output_file_id": end.get("output_file_id"),
            "error_file_id": end.get("error_file_id"),
            "created_at": asked.created_at,
            "in_progress_at": (started or {}).get("at"),
            "expires_at": asked.expires_at,
            "finalizing_at": (finalizing or {}).get("at"),
            "cancelling_at": (cancelling or {}).get("at"),
            "request_counts": {
                "total": (started or {}).get("total", 0),
                "completed": counts.get("completed", 0),
                "failed": counts.get("failed", 0),
            },
            "usage": end.get("usage"),
            "metadata": asked.metadata,
        }
        for outcome in ("completed", "failed", "expired", "cancelled"):
            found[f"{outcome}_at"] = end.get("at") if status == outcome else None
        return found


class BatchStore:
    """The batches of one tenant. `tenant`: None without keys. Methods raise OSError."""

    def __init__(self, results: Path, tenant: str | None) -> None:
        self.folder = tenant_folder(results, AREA, tenant)
        self._tenant = tenant

    def add(self, asked: Asked, content: Path, most: int | None) -> StoredBatch:
        """Keep a batch. `content`: of its input. `most`: batches of the tenant that may be open.
        Raises HttpError if it has so many, and FileNotFoundError without the content."""
        with locked(self.folder), unfinished_folder(self.folder) as path:
            if most is not None and (count := sum(1 for _ in self.open(set()))) >= most:
                raise HttpError(
                    429,
                    f"tenant {self._tenant!r} has {count} batches that have not ended, and the "
                    f"limit is {most}: wait until one has ended",
                    "rate_limit_exceeded",
                    kind="rate_limit_error",
                    headers={"x-should-retry": "false"},
                )
            _link(content, path / INPUT)
            write_json(path / ASKED, asdict(asked))
            final = self.folder / new_id(BATCH)
            publish(path, final)
        return StoredBatch(final, self._tenant)

    def get(self, id: str) -> StoredBatch:
        """Raises HttpError 404 for a batch that there is not, or of another tenant."""
        found = self._batch(id) if is_id(BATCH, id) else None
        if found is None:
            raise HttpError(
                404, f"no batch {id[:100]!r}: it was never made, or was removed", "not_found", "id"
            )
        return found

    def listed(self, page: Page) -> tuple[list[dict[str, Any]], bool]:
        """A page of the batches, and whether there are more."""

        def read(id: str) -> dict[str, Any] | None:
            found = self._batch(id)
            return None if found is None else found.to_dict()

        return select(self._ids(), page, read)

    def open(self, known: set[str]) -> Iterator[StoredBatch]:
        """The batches that have not ended, the oldest first. `known`: those that have; it is
        updated, so that they are looked at once."""
        for id in self._ids():
            if id in known:
                continue
            batch = StoredBatch(self.folder / id, self._tenant)
            if batch.has(ENDED):
                known.add(id)
            else:
                yield batch

    def sweep(self) -> None:
        """Remove the batches that ended long ago, and what killed processes have left."""
        for id in self._ids():
            ended = StoredBatch(self.folder / id, self._tenant).fact(ENDED)
            if ended is not None and time.time() >= ended["at"] + KEPT_SECONDS:
                remove(self.folder / id)
        remove_left(self.folder)

    def _batch(self, id: str) -> StoredBatch | None:
        batch = StoredBatch(self.folder / id, self._tenant)
        return batch if batch.fact(ASKED) is not None else None

    def _ids(self) -> list[str]:
        return [name for name in names_in(self.folder) if is_id(BATCH, name)]


def stores(results: Path) -> list[BatchStore]:
    """The batches of all tenants that have some."""
    names = names_in(results / AREA)
    return [BatchStore(results, None if name == WITHOUT_KEYS else name) for name in names]


def _link(source: Path, target: Path) -> None:
    """The same content under another name. Raises FileNotFoundError."""
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)  # a file system without hard links, or no file
