"""The files of a tenant on the results disk. A file is complete, or not there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jobs.gateway.failures import HttpError
from jobs.gateway.folders import (
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
from jobs.gateway.ids import FILE, is_id, new_id
from jobs.gateway.paging import Page, select
from jobs.sizes import size_texts

AREA = ".files"
OUTPUT = "batch_output"  # the purpose of the files that batches write
DATA = "data"
FACTS = "file.json"
KINDS = {
    "bytes": int,
    "created_at": int,
    "expires_at": int | None,
    "filename": str,
    "purpose": str,
}


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What is known of a file. Times are seconds since the epoch."""

    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> StoredFile:
        return cls(**{name: content.get(name) for name in cls.__slots__})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """The file as OpenAI's API shows it."""
        facts = {"object": "file", "status": "processed", "status_details": None}
        return {**asdict(self), **facts}

    @property
    def has_expired(self) -> bool:
        return self.expires_at is not None and time.time() >= self.expires_at


class FileStore:
    """The files of one tenant. `tenant`: None without keys. Methods raise OSError."""

    def __init__(self, results: Path, tenant: str | None) -> None:
        self.folder = tenant_folder(results, AREA, tenant)
        self._tenant = tenant

    def unfinished(self) -> AbstractContextManager[Path]:
        """A folder whose file DATA becomes a file by `add`."""
        return unfinished_folder(self.folder)

    def add(
        self, path: Path, filename: str, purpose: str, seconds: int | None, most: int | None
    ) -> StoredFile:
        """Keep an unfinished file. `seconds`: until it expires. `most`: bytes of all files of the
        tenant. Raises HttpError if they would have more."""
        with locked(self.folder):
            size = (path / DATA).stat().st_size
            self.check_room(size, most)
            return self.put(new_id(FILE), path, filename, purpose, int(time.time()), seconds)

    def put(
        self, id: str, path: Path, filename: str, purpose: str, created: int, seconds: int | None
    ) -> StoredFile:
        """Keep an unfinished file under an id. One that is there stays as it is."""
        file = StoredFile(
            id=id,
            bytes=(path / DATA).stat().st_size,
            created_at=created,
            expires_at=None if seconds is None else created + seconds,
            filename=filename,
            purpose=purpose,
        )
        write_json(path / FACTS, asdict(file))
        publish(path, self.folder / id)
        return file

    def check_room(self, size: int, most: int | None) -> None:
        """Raises HttpError if the tenant may not have so many bytes more."""
        if most is None:
            return
        used = sum(self._sizes())
        if used + size > most:
            wanted, limit = size_texts(used + size, most)
            raise HttpError(
                429,
                f"the files of tenant {self._tenant!r} would have {wanted}, and its limit is "
                f"{limit}: delete files",
                "insufficient_quota",
                kind="insufficient_quota",
                headers={"x-should-retry": "false"},
            )

    def get(self, id: str, param: str = "id") -> StoredFile:
        """Raises HttpError 404 for a file that there is not, or of another tenant."""
        found = self._read(id) if is_id(FILE, id) else None
        if found is None:
            raise no_file(id, param)
        return found

    def open(self, id: str) -> BinaryIO:
        """The content of a file. Raises HttpError 404."""
        self.get(id)
        try:
            return (self.folder / id / DATA).open("rb")
        except FileNotFoundError:
            raise no_file(id, "id") from None

    def content(self, id: str) -> Path:
        """The path of the content of a file that `get` has found."""
        return self.folder / id / DATA

    def listed(self, page: Page, purpose: str | None) -> tuple[list[StoredFile], bool]:
        """A page of the files, and whether there are more. `purpose`: only these."""

        def read(id: str) -> StoredFile | None:
            file = self._read(id)
            return file if file and purpose in (None, file.purpose) else None

        return select(self._ids(), page, read)

    def delete(self, id: str) -> None:
        """Raises HttpError 404."""
        self.get(id)
        if not remove(self.folder / id):
            raise no_file(id, "id")

    def sweep(self) -> None:
        """Remove the files that have expired, and what killed processes have left."""
        for id in self._ids():
            file = self._stored(id)
            if file is not None and file.has_expired:
                remove(self.folder / id)
        remove_left(self.folder)

    def _read(self, id: str) -> StoredFile | None:
        file = self._stored(id)
        return None if file is None or file.has_expired else file

    def _stored(self, id: str) -> StoredFile | None:
        """A file, though it may have expired."""
        content = read_json(self.folder / id / FACTS, KINDS)
        return None if content is None else StoredFile.from_dict(content)

    def _ids(self) -> list[str]:
        return [name for name in names_in(self.folder) if is_id(FILE, name)]

    def _sizes(self) -> Iterator[int]:
        for id in self._ids():
            with suppress(FileNotFoundError):  # it was removed since
                yield os.stat(self.folder / id / DATA).st_size


def no_file(id: object, param: str) -> HttpError:
    shown = id[:100] if isinstance(id, str) else id
    return HttpError(
        404,
        f"no file {shown!r}: it was never uploaded, was deleted or has expired",
        "not_found",
        param,
    )
