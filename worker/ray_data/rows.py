"""Rows of a batch → requests, with the columns, modes and templates of `chatjobs run`.

The driver makes a reader to find mistakes before the first actor starts; each actor has its own.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import repeat
from typing import Any

import pyarrow as pa

from jobs.api.request import ChatRequest
from jobs.api.row_keys import MAX_ROW, hashed_row
from jobs.api.wire import describe
from jobs.data_sets.conventions import conventions
from jobs.data_sets.data_set import sample_seed
from jobs.data_sets.fields import SOURCES, request_fields
from jobs.data_sets.modes import MODES, SCORE_MODES
from jobs.data_sets.parquet_rows import table_rows
from jobs.data_sets.requests import (
    ROW_FIELDS,
    InvalidLine,
    OptionNames,
    Overrides,
    RequestReader,
    custom_id_of,
)
from jobs.data_sets.row_templates import RowTemplate
from jobs.data_sets.score_items import ItemReader, known_fields, row_fields
from jobs.errors import InvalidRequest, JobError, failure_of, invalid
from jobs.keys import RUN_ID
from jobs.operations import Request
from jobs.results.rows import request_hash
from jobs.results.schema import SCHEMA
from worker.ray_data.arguments import PredictorArguments

ROW_INDEX = "row_index"  # the field that numbers a row
NO_OPTIONS = ("model", "messages", "items", "job")  # fields that rows and arguments set
# A row of each mode, to check options with.
PROBES: dict[str, dict[str, Any]] = {
    "chat": {"prompt": "?"},
    "completion": {"prompt": "?"},
    "loglikelihood": {"prompt": "?", "continuations": ["!"]},
    "choice": {"prompt": "?", "choices": ["A", "B"]},
    "perplexity": {"text": "?"},
}
ARGUMENTS = OptionNames(
    option=lambda name: f"options[{name!r}]",
    map=lambda column, field: f"columns={{{column!r}: {field!r}}}",
    mode=lambda mode: f"mode={mode!r}",
)


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A row that the engine answers. job_id: names its results."""

    job_id: str
    request: Request


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """A row that has no request. fields: of its request, as far as they are known."""

    job_id: str
    error: JobError
    fields: Mapping[str, Any]


BatchRow = RequestRow | ErrorRow


class RowReader:
    """Makes the requests of one model. Raises JobError for an argument that no row can be read
    with."""

    def __init__(self, arguments: PredictorArguments) -> None:
        mode, run, seed = arguments.mode, arguments.run, arguments.seed
        if mode not in MODES:
            raise invalid(f"mode: must be one of {', '.join(MODES)}, got {describe(mode)}", "mode")
        if not isinstance(run, str) or not RUN_ID.fullmatch(run):
            raise invalid(f"run: {describe(run)} is not a name that a run can have", "run")
        if seed is not None and type(seed) is not int:
            raise invalid(f"seed: must be an integer, got {describe(seed)}", "seed")
        self._scores = mode in SCORE_MODES
        self._mode, self._run, self._seed = mode, run, seed
        fields = (ROW_INDEX, *SOURCES, *ROW_FIELDS, *request_fields())
        self._fields = frozenset((ROW_INDEX, *row_fields(mode)) if self._scores else fields)
        self._columns = self._checked_columns(arguments.columns or {})
        self._overrides = Overrides(
            arguments.model,
            run,
            fields=_options_of(arguments.options or {}, mode),
            names=self._columns,
            ignore_unknown=True,
            own_ids=True,
            mode=mode,
            delimiter=arguments.delimiter,
            option_names=ARGUMENTS,
        )
        line = self._reader({}).read(None, "", 0, PROBES[mode])
        if isinstance(line, InvalidLine):
            raise line.error
        template = arguments.template
        self._template = None if template is None else RowTemplate(template, {})

    def kept(self, columns: Sequence[str]) -> list[str]:
        """The columns of a data set that stay beside those of the results. Raises InvalidRequest
        for columns that no row could be read with, and for one that nothing reads and a result
        would replace."""
        names = self._names(columns)
        held = Counter(names.get(column, column) for column in columns)
        twice = next((field for field, count in held.items() if count > 1), None)
        if twice is not None:
            both = [column for column in columns if names.get(column, column) == twice]
            raise invalid(f"columns {both[0]!r} and {both[1]!r} both hold {twice}: drop one", twice)
        for column in columns:
            if column in SCHEMA.names and names.get(column, column) not in self._fields:
                raise invalid(
                    f"column {column!r}: results have a column of this name: rename yours, such as "
                    f"with ds.rename_columns({{{column!r}: {f'my_{column}'!r}}}), or drop it",
                    column,
                )
        return [column for column in columns if column not in SCHEMA.names]

    def read(self, batch: pa.Table) -> list[BatchRow]:
        """The requests of all rows, in order."""
        names = self._names(batch.column_names)
        reader = self._reader(names)
        wanted = batch.column_names
        if self._template is None:
            wanted = [name for name in wanted if names.get(name, name) in self._fields]
        rows = table_rows(batch.select(wanted)) if wanted else repeat({}, batch.num_rows)
        return [self._row(row, names, reader) for row in rows]

    def _reader(self, names: Mapping[str, str]) -> RequestReader | ItemReader:
        """The reader of rows with some columns. `names`: the fields that they hold."""
        overrides = replace(self._overrides, names=names)
        return (ItemReader if self._scores else RequestReader)(overrides, None, "column")

    def _checked_columns(self, columns: Mapping[str, str]) -> dict[str, str]:
        for column, field in columns.items():
            if field not in self._fields:
                close = get_close_matches(str(field), self._fields, 1)
                known = ", ".join(sorted(self._fields))
                hint = f"did you mean {close[0]!r}?" if close else f"known fields: {known}"
                raise invalid(f"columns[{column!r}]: unknown field {field!r}; {hint}", "columns")
        return dict(columns)

    def _names(self, columns: Sequence[str]) -> dict[str, str]:
        """The fields that columns hold, by convention and as they were given."""
        found = conventions([self._columns.get(column, column) for column in columns], self._mode)
        return {**found, **self._columns}

    def _row(
        self,
        row: Mapping[str, Any] | InvalidRequest,
        names: Mapping[str, str],
        reader: RequestReader | ItemReader,
    ) -> BatchRow:
        if isinstance(row, InvalidRequest):
            return self._bad({}, None, row)
        # Tensors, as Ray has them, become lists.
        row = {name: one.tolist() if hasattr(one, "tolist") else one for name, one in row.items()}
        data = {names.get(name, name): value for name, value in row.items()}
        number: int | None = None
        try:
            number = _row_number(data.pop(ROW_INDEX, None))
            if self._template is not None:
                data = self._filled(data, self._template.fill({**data, **row}))
            line = reader.read(number, "", 0, data)
        except Exception as error:  # whatever a row holds, it fails alone
            return self._bad(data, number, failure_of(error))
        if isinstance(line, InvalidLine):
            fault = InvalidRequest(line.error.code, line.sentence, line.error.param)
            return self._bad(data, number, fault)
        custom_id = custom_id_of(data)
        request: Request = line.request
        if isinstance(request, ChatRequest) and request.seed is None and self._seed is not None:
            request.seed = sample_seed(self._seed, _key_of(request, number, custom_id), 0)
        return RequestRow(_job_id(custom_id), request)

    def _filled(self, data: Mapping[str, Any], text: str) -> dict[str, Any]:
        """A row with the text of a template in place of any prompt that it has."""
        rest = {name: value for name, value in data.items() if name not in SOURCES}
        return {**rest, "text" if self._mode == "perplexity" else "prompt": text}

    def _bad(self, data: dict[str, Any], number: int | None, error: JobError) -> ErrorRow:
        custom_id = custom_id_of(data)
        named = {"custom_id": custom_id} if custom_id else {}
        known: dict[str, Any] = {"model": self._overrides.model, "job": {**named}}
        if self._scores:
            known = {**known_fields(self._overrides, custom_id), "job": {}}
        known["job"] |= {"run": self._run, "row": number}
        return ErrorRow(_job_id(custom_id), error, known)


def _job_id(custom_id: str | None) -> str:
    """An id for the results of one row: the same for the same custom_id, so that their keys are the
    same in each run."""
    if custom_id is None:
        return secrets.token_hex(16)
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _options_of(options: Mapping[str, Any], mode: str) -> dict[str, Any]:
    name = next((name for name in NO_OPTIONS if name in options), None)
    if name is not None:
        raise invalid(f"options: {name} is set by the rows and the other arguments: omit it", name)
    return {**options, **({"apply_chat_template": False} if mode == "completion" else {})}


def _row_number(value: Any) -> int | None:
    """The number of a row, if it has one. Raises InvalidRequest."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_ROW:
        raise invalid(f"row_index: must be an integer from 0, got {describe(value)}", ROW_INDEX)
    return value


def _key_of(request: ChatRequest, number: int | None, custom_id: str | None) -> int:
    """What the seed of a row depends on: its number, its custom_id, or its content."""
    if number is not None:
        return number
    return hashed_row(request_hash(request.to_dict()) if custom_id is None else custom_id)
