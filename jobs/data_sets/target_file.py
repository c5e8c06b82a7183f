"""Expected answers in a file of their own, which came after their run was made."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from jobs.api.wire import describe
from jobs.data_sets.data_set import shown_columns
from jobs.data_sets.disk_table import DiskTable
from jobs.data_sets.requests import target_text, text_of
from jobs.data_sets.row_files import RowFile, opened_rows
from jobs.errors import InvalidRequest, invalid
from jobs.results.files import Results
from jobs.scores.outcome import Row
from jobs.scores.targets import TARGET_KEY
from jobs.sizes import counted

FIELDS = ("target", "custom_id", "row_index")  # that columns of the file hold
BATCH_ROWS = 4096


class TargetFile:
    """The targets of a file by the keys of its rows: `Targets` of jobs.scores. The key is the
    custom_id if the first row has one, else the row_index.

    Reads the file when it is made. Raises InvalidRequest for a file that can't be read, that lacks
    a column, or that has a key twice. Closes its table as a context.
    """

    def __init__(self, path: Path, names: Mapping[str, str]) -> None:
        """`names`: fields of rows by the names of their columns, of --map."""
        self._path, self._names = path, names
        self._targets, self._key = DiskTable(), ""
        digest = hashlib.blake2b(digest_size=16)
        try:
            with opened_rows(path, names) as rows:
                try:
                    self._read(rows, digest)
                except InvalidRequest as error:
                    raise invalid(f"{path}: {error.message}", error.param) from None
        except BaseException:
            self._targets.close()
            raise
        self.digest = digest.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._targets.close()

    def of(self, row: Row) -> str | None:
        """The target of a row of the run; None if its field is empty. Raises KeyError if the file
        has no such row."""
        return self._targets.get(_stored(str(row[self._key])))

    def check(self, results: Results, run: str) -> None:
        """Raise InvalidRequest if the file lacks a row of a run."""
        count = missing = 0
        first = ""
        rows = results.dataset(run)
        for batch in rows.to_batches(columns=[*TARGET_KEY], batch_size=BATCH_ROWS):
            for row in batch.to_pylist():
                count += 1
                try:
                    self.of(row)
                except KeyError:
                    missing += 1
                    first = first or f"row_index {row['row_index']}, custom_id {row['custom_id']!r}"
        if missing:
            raise invalid(
                f"{self._path} has no target for {missing} of {counted(count, 'row')} of run "
                f"{run}, such as {first}: it is read by {self._key}; add these rows, without a "
                "target where there is none",
                "target",
            )

    def _read(self, rows: RowFile, digest: Any) -> None:
        columns: dict[str, None] = {}  # of the rows so far
        has_target = False
        for number, data in rows:
            place = f"{rows.unit} {number}"
            if isinstance(data, InvalidRequest):
                raise invalid(f"{place}: {data.message}", data.param)
            columns.update(dict.fromkeys(data))
            if not self._key:
                self._key = "custom_id" if data.get("custom_id") is not None else "row_index"
            key, target = self._key_of(data, place, columns), _text(data, "target", place)
            has_target |= target is not None
            if not self._targets.add(_stored(key), target):
                raise invalid(
                    f"{place}: a row before it has {self._key} {key!r} as well: remove one of them",
                    self._key,
                )
            digest.update(f"{len(key)} {key} {target}\n".encode("utf-8", "surrogatepass"))
        if not has_target:
            raise invalid(
                "no row has a target: name their column target, or take another one by --map "
                f"COLUMN=target{self._have(columns)}",
                "target",
            )

    def _key_of(self, data: Mapping[str, Any], place: str, columns: Mapping[str, None]) -> str:
        """The key of a row, as text."""
        key = _text(data, self._key, place)
        if self._key == "custom_id" and key is not None:
            return key
        if key is None:
            raise invalid(
                f"{place} has no {self._key}: a row needs the custom_id or the row_index of a row "
                "of the run; --map COLUMN=custom_id takes another column as one"
                f"{self._have(columns)}",
                self._key,
            )
        with suppress(ValueError):
            if (index := int(key)) >= 0:
                return str(index)
        raise invalid(f"{place}: row_index: {key[:40]!r} is no integer from 0", "row_index")

    def _have(self, columns: Mapping[str, None]) -> str:
        """The columns of the file, at the end of a sentence."""
        originals = {new: old for old, new in self._names.items()}
        names = [originals.get(name, name) for name in columns]
        return f"; its columns are {shown_columns(names)}" if names else ""


def _text(data: Mapping[str, Any], name: str, place: str) -> str | None:
    value = (text_of if name == "custom_id" else target_text)(data.get(name))
    if value is None or isinstance(value, str):
        return value
    raise invalid(f"{place}: {name}: expected text or a number, got {describe(value)}", name)


def _stored(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")
