"""The data set of `chatjobs run`: files of rows, read as requests of one run.

It has the reader of `chatjobs submit`, and another policy: a row that is no request becomes a row
with an error, and columns that nothing uses are ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, Self

from jobs.data_sets.few_shot import Examples, Shots, group_of
from jobs.data_sets.fields import SOURCES, request_fields
from jobs.data_sets.id_index import IdIndex
from jobs.data_sets.modes import SCORE_MODES
from jobs.data_sets.requests import (
    KEEP_ALL,
    ROW_FIELDS,
    InvalidLine,
    Overrides,
    RequestLine,
    RequestReader,
    custom_id_of,
)
from jobs.data_sets.row_files import RowFile, opened_rows
from jobs.data_sets.row_templates import MAX_BROKEN, BrokenTemplate, RowTemplate
from jobs.data_sets.score_items import ItemLine, ItemReader, known_fields, row_fields
from jobs.data_sets.source import ErrorRow, RequestRow, SourceRow, Wanted
from jobs.errors import InvalidRequest, invalid
from jobs.sizes import counted, size_text
from jobs.store.rq_layout import MAX_DATA

MAX_SHOWN = 50  # columns in a sentence
FIRST_ROWS = 100  # that are looked at before the run begins


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of the first rows, in their order."""

    names: tuple[str, ...]
    models: tuple[str, ...]  # of their requests
    unused: tuple[str, ...]  # neither fields of a request nor kept


class DataSet:
    """The rows of some files, one behind the other. Closes its files as a context.

    Raises InvalidRequest for a file that can't be read.
    """

    def __init__(
        self,
        files: list[Path],
        overrides: Overrides,
        *,
        limit: int | None = None,
        template: RowTemplate | None = None,
        choices: RowTemplate | None = None,
        examples: Examples | None = None,
        seed: int | None = None,
        samples: int = 1,
    ) -> None:
        """`template`: makes the prompts. `choices`: makes the choices. `examples`: conversations
        before each prompt. `seed`: of the run, for requests that have none. `samples`: of each
        row."""
        self.samples = samples
        self._stack = ExitStack()
        self._limit, self._template, self._choices = limit, template, choices
        self._examples, self._seed = examples, seed
        self._files: list[RowFile] = []
        with ExitStack() as stack:
            for file in files:
                self._files.append(stack.enter_context(opened_rows(file, overrides.names)))
            self._stack = stack.pop_all()
        self._overrides = overrides

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def content(self) -> tuple[str, int]:
        """A digest of all files, and about how many samples there are."""
        digest, rows = hashlib.blake2b(digest_size=16), 0
        for file in self._files:
            with self._named(file):
                found, count = file.content()
            digest.update(found.encode())
            rows += count
        rows = rows if self._limit is None else min(rows, self._limit)
        return digest.hexdigest(), rows * self.samples

    def configuration(self, content: str) -> dict[str, Any]:
        """The values that decide on the answers of a run. `content`: the digest of the files."""
        overrides, template, examples = self._overrides, self._template, self._examples
        later = {"delimiter": overrides.delimiter, "choices": self._choices and self._choices.text}
        return {
            "mode": overrides.mode,
            "model": overrides.model,
            "data set": {"content": content},
            "limit": self._limit,
            "options": dict(sorted(overrides.fields.items())),
            "map": dict(sorted(overrides.names.items())),
            "keep": sorted(overrides.keep),
            "template": None if template is None else template.text,
            "few-shot": None if examples is None else examples.configuration(),
            "seed": self._seed,
            "num-samples": self.samples,
            **{name: value for name, value in later.items() if value is not None},
        }

    def check(self) -> Columns:
        """Look at the first rows. Raises InvalidRequest if there are none, if none of them is a
        request, if a template is too slow for several, or if a column that an option names is in
        none."""
        rows = list(islice(self._rows(), FIRST_ROWS))
        if not rows:
            raise invalid("there are no rows")
        names = tuple(
            dict.fromkeys(
                name for _, _, data in rows if not isinstance(data, InvalidRequest) for name in data
            )
        )
        columns = dict.fromkeys(name for file in self._files for name in file.columns)
        absent = [name for name in self._overrides.names if name not in columns]
        if absent:
            raise invalid(
                f"there is no column {absent[0]!r} for --map; the first rows have: "
                f"{shown_columns([*columns])}"
            )
        with closing(IdIndex()) as ids:
            read: list[RequestLine | ItemLine | InvalidLine] = []
            broken = 0
            for file, place, data in rows:
                line = self._line(self._reader(ids, file), 0, place, data)
                read.append(line)
                if isinstance(line, InvalidLine) and isinstance(line.error, BrokenTemplate):
                    broken += 1
                    if broken == MAX_BROKEN:
                        raise invalid(
                            f"{line.error.message}, for {broken} of the first "
                            f"{counted(len(read), 'row')}, as for {place}: correct the template"
                        )
        bad = [one for one in read if isinstance(one, InvalidLine)]
        if len(bad) == len(read):
            what = "the first row" if len(read) == 1 else f"all of the first {len(read)} rows"
            raise invalid(f"{what} can't be run: {rows[0][1]}: {bad[0].sentence}")
        originals = {new: old for old, new in self._overrides.names.items()}
        have = shown_columns([originals.get(name, name) for name in names])
        known = {*SOURCES, *ROW_FIELDS, *request_fields()}
        if self._overrides.mode in SCORE_MODES:
            known = {*row_fields(self._overrides.mode)}
        kept = self._overrides.keep
        missing = [name for name in kept if name != KEEP_ALL and name not in names]
        if missing:
            raise invalid(
                f"none of the first {len(rows)} rows has the column {missing[0]!r} to keep; they "
                f"have: {have}"
            )
        by = None if self._examples is None else self._examples.by
        if by is not None and self._field(by) not in names:
            raise invalid(
                f"none of the first {len(rows)} rows has the column {by!r} of --few-shot-by; they "
                f"have: {have}"
            )
        used = {*known, *kept, by}
        unused = tuple(name for name in names if name not in used)
        if KEEP_ALL in kept or self._template or self._choices:  # which may use any column
            unused = ()
        models = {one.request.model for one in read if not isinstance(one, InvalidLine)}
        return Columns(names, tuple(sorted(models)), () if "body" in names else unused)

    def read(self, wanted: Wanted) -> Iterator[SourceRow | None]:
        with closing(IdIndex()) as ids:
            readers = {file: self._reader(ids, file) for file in self._files}
            for index, (file, place, data) in enumerate(islice(self._rows(), self._limit)):
                first = index * self.samples
                numbers = [n for n in range(first, first + self.samples) if wanted(n)]
                if not numbers:
                    readers[file].skip(place, data)
                    yield from repeat(None, self.samples)
                    continue
                line = self._line(readers[file], index, place, data)
                if isinstance(line, InvalidLine):  # its custom_id is taken, as when it is skipped
                    readers[file].skip(place, data)
                for number in range(first, first + self.samples):
                    if number in numbers:
                        yield self._sample(number, index, place, line, data)
                    else:
                        yield None
        changed = next((file.name for file in self._files if file.has_changed()), None)
        if changed is not None:
            what = "the file" if len(self._files) == 1 else Path(changed).name
            raise invalid(
                f"{what} has changed while it was read, and rows may be of both versions: restore "
                "it, or run it as another run (--run ID)"
            )

    def _reader(self, ids: IdIndex, file: RowFile) -> RequestReader | ItemReader:
        scores = self._overrides.mode in SCORE_MODES
        return (ItemReader if scores else RequestReader)(self._overrides, ids, file.part)

    def _line(
        self,
        reader: RequestReader | ItemReader,
        index: int,
        place: str,
        data: dict[str, Any] | InvalidRequest,
    ) -> RequestLine | ItemLine | InvalidLine:
        """The request of a row, without its examples, or why it has none."""
        if isinstance(data, InvalidRequest):
            return reader.read(index, place, 0, data)
        line = reader.read(index, place, 0, self._filled(data))
        try:
            if not isinstance(line, InvalidLine):
                self._shots(data)
        except InvalidRequest as error:
            return InvalidLine(0, error)
        return line

    def _filled(self, data: dict[str, Any]) -> dict[str, Any] | InvalidRequest:
        """A row with the texts of the templates in place of any that it has."""
        filled = data
        try:
            if self._template is not None:
                field = "text" if self._overrides.mode == "perplexity" else "prompt"
                filled = {name: value for name, value in data.items() if name not in SOURCES}
                filled[field] = self._template.fill(data)
            if self._choices is not None:
                filled = {**filled, "choices": choices_in(self._choices.fill(data))}
        except InvalidRequest as error:
            return error
        return filled

    def _shots(self, data: Mapping[str, Any]) -> Shots | None:
        """The examples of a row. Raises InvalidRequest."""
        examples = self._examples
        if examples is None:
            return None
        return examples.of(None if examples.by is None else data.get(self._field(examples.by)))

    def _field(self, column: str) -> str:
        """The name in rows of a column of the file."""
        return self._overrides.names.get(column, column)

    def first_of_groups(self, by: str | None, count: int) -> dict[int, str]:
        """The first `count` rows of each group, as numbers of rows with their `group_of`; the
        groups are the values of the column `by`. Raises InvalidRequest if no row has it."""
        chosen: dict[int, str] = {}
        found: Counter[str] = Counter()
        name = None if by is None else self._field(by)
        exists = name is None
        for number, (_, _, data) in enumerate(self._rows()):
            row = {} if isinstance(data, InvalidRequest) else data
            exists = exists or name in row
            group = group_of(None if name is None else row.get(name))
            if found[group] < count:
                found[group] += 1
                chosen[number] = group
            if by is None and len(chosen) == count:
                break
        if not exists:
            raise invalid(f"there is no column {by!r} of --few-shot-by", "few_shot")
        return chosen

    def _sample(
        self,
        number: int,
        row: int,
        place: str,
        line: RequestLine | ItemLine | InvalidLine,
        data: dict[str, Any] | InvalidRequest,
    ) -> SourceRow:
        """One sample of a row, with the examples and a seed of its own."""
        again = number % self.samples
        if isinstance(line, InvalidLine):
            error = InvalidRequest(line.error.code, line.sentence, line.error.param)
            return ErrorRow(number, row, again, place, error, self._known(data))
        if isinstance(line, ItemLine):
            return RequestRow(number, row, again, place, line.request, line.size)
        request, size = line.request, line.size
        if self.samples > 1:
            request = request.model_copy()
        if again:
            request.job = request.job.model_copy(update={"repeat": again})
        if request.seed is None and self._seed is not None:
            request.seed = sample_seed(self._seed, row, again)
        elif request.seed is not None and again:
            request.seed = sample_seed(request.seed, row, again)
        assert not isinstance(data, InvalidRequest)
        if (shots := self._shots(data)) is not None:
            size += shots.size
            if size > MAX_DATA:
                error = invalid(
                    f"the request and its examples have {size_text(size)} as JSON, and a job holds "
                    f"at most {size_text(MAX_DATA)}: shorten it"
                )
                return ErrorRow(number, row, again, place, error, request.to_dict())
            request.messages = shots.before(request.messages)
        return RequestRow(number, row, again, place, request, size)

    def _rows(self) -> Iterator[tuple[RowFile, str, dict[str, Any] | InvalidRequest]]:
        return chain.from_iterable(map(self._rows_of, self._files))

    def _rows_of(
        self, file: RowFile
    ) -> Iterator[tuple[RowFile, str, dict[str, Any] | InvalidRequest]]:
        where = f" of {Path(file.name).name}" if len(self._files) > 1 else ""
        with self._named(file):
            for number, data in file:
                yield file, f"{file.unit} {number}{where}", data

    @contextmanager
    def _named(self, file: RowFile) -> Iterator[None]:
        """Errors about one of several files name it."""
        try:
            yield
        except InvalidRequest as error:
            if len(self._files) == 1:
                raise
            message = f"{Path(file.name).name}: {error.message}"
            raise InvalidRequest(error.code, message, error.param) from None

    def _known(self, data: dict[str, Any] | InvalidRequest) -> dict[str, Any]:
        """The fields of the request of an invalid row that are known."""
        custom_id = custom_id_of(data)
        if self._overrides.mode in SCORE_MODES:
            return known_fields(self._overrides, custom_id)
        found: dict[str, Any] = {"model": self._overrides.model}
        if custom_id is not None:
            found["job"] = {"custom_id": custom_id}
        return found


def choices_in(text: str) -> list[Any]:
    """The choices that a template has made: a JSON list, or one a line. Raises InvalidRequest."""
    found: list[Any] = [line.strip() for line in text.splitlines() if line.strip()]
    if text.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            found = json.loads(text)
    if not found:
        raise invalid("the template of choices makes none for this row", "choices")
    return found


def shown_columns(names: Sequence[str]) -> str:
    """The names of columns in a sentence: of a wide file the first ones."""
    rest = len(names) - MAX_SHOWN
    more = f" and {counted(rest, 'more column')}" if rest > 0 else ""
    return f"{', '.join(names[:MAX_SHOWN])}{more}"


def sample_seed(seed: int, row: int, repeat: int) -> int:
    """The seed of one sample of a row: another one for each."""
    digest = hashlib.blake2b(f"{seed}/{row}/{repeat}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
