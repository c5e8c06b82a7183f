"""The data set of `chatjobs run`: files of rows, read as requests of one run.

It has the reader of `chatjobs submit`, and another policy: a row that is no request becomes a row
with an error, and columns that nothing uses are ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, Self

from jobs.api.message import Message
from jobs.api.request import ChatRequest
from jobs.cli.few_shot import Example, Examples
from jobs.cli.field_options import SOURCES
from jobs.cli.id_index import IdIndex
from jobs.cli.requests import (
    KEEP_ALL,
    ROW_FIELDS,
    InvalidLine,
    Overrides,
    RequestLine,
    RequestReader,
    custom_id_of,
)
from jobs.cli.row_files import RowFile
from jobs.cli.row_templates import RowTemplate
from jobs.cli.score_items import SCORE_MODES, ItemLine, ItemReader, known_fields, row_fields
from jobs.errors import InvalidRequest, invalid
from jobs.runs.source import SourceRow, Wanted
from jobs.sizes import counted, size_text
from jobs.store.rq_layout import MAX_DATA

FIRST_ROWS = 100  # that are looked at before the run begins
# Columns that hold the prompt and the expected answer, where no column has the name of a field.
PAIRS = (("question", "answer"), ("instruction", "output"), ("input", "output"))
# And those of multiple choice.
CHOICES = ("options", "endings")
RIGHT_CHOICE = ("answer", "answerKey", "label")


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
        examples: Examples | None = None,
        seed: int | None = None,
        samples: int = 1,
    ) -> None:
        """`template`: makes the prompts. `examples`: conversations before each prompt. `seed`: of
        the run, for requests that have none. `samples`: of each row."""
        self.samples = samples
        self._stack = ExitStack()
        self._limit, self._template = limit, template
        self._examples, self._seed = examples, seed
        self._files: list[RowFile] = []
        with ExitStack() as stack:
            for file in files:
                opened = stack.enter_context(file.open("rb"))
                self._files.append(stack.enter_context(_row_file(opened, file, overrides)))
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
            found, count = file.content()
            digest.update(found.encode())
            rows += count
        rows = rows if self._limit is None else min(rows, self._limit)
        return digest.hexdigest(), rows * self.samples

    def configuration(self, content: str) -> dict[str, Any]:
        """The values that decide on the answers of a run. `content`: the digest of the files."""
        overrides, template, examples = self._overrides, self._template, self._examples
        delimiter = {} if overrides.delimiter is None else {"delimiter": overrides.delimiter}
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
            **delimiter,
        }

    def check(self) -> Columns:
        """Look at the first rows. Raises InvalidRequest if there are none, if none of them is a
        request, or if a column that an option names is in none."""
        rows = list(islice(self._rows(), FIRST_ROWS))
        if not rows:
            raise invalid("there are no rows")
        names = tuple(
            dict.fromkeys(
                name for _, _, data in rows if not isinstance(data, InvalidRequest) for name in data
            )
        )
        absent = [name for name in self._overrides.names if name not in self._files[0].columns]
        if absent:
            raise invalid(
                f"there is no column {absent[0]!r} for --map; the first rows have: "
                f"{', '.join(self._files[0].columns)}"
            )
        with closing(IdIndex()) as ids:
            read = [
                self._reader(ids, file).read(0, place, 0, self._with_prompt(data))
                for file, place, data in rows
            ]
        bad = [one for one in read if isinstance(one, InvalidLine)]
        if len(bad) == len(read):
            what = "the first row" if len(read) == 1 else f"all of the first {len(read)} rows"
            raise invalid(f"{what} can't be run: {rows[0][1]}: {bad[0].sentence}")
        originals = {new: old for old, new in self._overrides.names.items()}
        known = {*SOURCES, *ROW_FIELDS, *_request_names()}
        if self._overrides.mode in SCORE_MODES:
            known = {*row_fields(self._overrides.mode)}
        kept = self._overrides.keep
        missing = [name for name in kept if name != KEEP_ALL and name not in names]
        if missing:
            raise invalid(
                f"none of the first {len(rows)} rows has the column {missing[0]!r} to keep; they "
                f"have: {', '.join(originals.get(name, name) for name in names)}"
            )
        unused = tuple(name for name in names if name not in {*known, *kept})
        if KEEP_ALL in kept or self._template is not None:  # which may use any column
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
                line = readers[file].read(index, place, 0, self._with_prompt(data))
                for number in range(first, first + self.samples):
                    if number in numbers:
                        yield self._sample(number, index, place, line, data)
                    else:
                        yield None

    def _reader(self, ids: IdIndex, file: RowFile) -> RequestReader | ItemReader:
        scores = self._overrides.mode in SCORE_MODES
        return (ItemReader if scores else RequestReader)(self._overrides, ids, file.part)

    def _with_prompt(
        self, data: dict[str, Any] | InvalidRequest
    ) -> dict[str, Any] | InvalidRequest:
        if self._template is None or isinstance(data, InvalidRequest):
            return data
        return self._template.apply(
            data, "text" if self._overrides.mode == "perplexity" else "prompt"
        )

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
            return SourceRow(number, row, again, place, None, error, 0, self._known(data))
        if isinstance(line, ItemLine):
            return SourceRow(number, row, again, place, line.request, None, line.size)
        request, size = line.request, line.size
        if self.samples > 1:
            request = request.model_copy()
        if again:
            request.job = request.job.model_copy(update={"repeat": again})
        if request.seed is None and self._seed is not None:
            request.seed = sample_seed(self._seed, row, again)
        elif request.seed is not None and again:
            request.seed = sample_seed(request.seed, row, again)
        if self._examples is not None:
            size += self._examples.size
            if size > MAX_DATA:
                error = invalid(
                    f"the request and its examples have {size_text(size)} as JSON, and a job holds "
                    f"at most {size_text(MAX_DATA)}: shorten it"
                )
                return SourceRow(number, row, again, place, request, error)
            request.messages = self._examples.before(request.messages)
        return SourceRow(number, row, again, place, request, None, size)

    def _rows(self) -> Iterator[tuple[RowFile, str, dict[str, Any] | InvalidRequest]]:
        return chain.from_iterable(map(self._rows_of, self._files))

    def _rows_of(
        self, file: RowFile
    ) -> Iterator[tuple[RowFile, str, dict[str, Any] | InvalidRequest]]:
        where = f" of {Path(file.name).name}" if len(self._files) > 1 else ""
        for number, data in file:
            yield file, f"{file.unit} {number}{where}", data

    def _known(self, data: dict[str, Any] | InvalidRequest) -> dict[str, Any]:
        """The fields of the request of an invalid row that are known."""
        custom_id = custom_id_of(data)
        if self._overrides.mode in SCORE_MODES:
            return known_fields(self._overrides, custom_id)
        found: dict[str, Any] = {"model": self._overrides.model}
        if custom_id is not None:
            found["job"] = {"custom_id": custom_id}
        return found


def read_examples(
    file: Path, count: int, overrides: Overrides, template: RowTemplate | None
) -> Examples:
    """The examples of --few-shot. Raises InvalidRequest."""
    plain = replace(overrides, names={}, keep=())
    names = {old: new for old, new in overrides.names.items() if old in _first_row([file], plain)}
    overrides = with_conventions(replace(plain, names=names), [file])
    with DataSet([file], overrides, limit=count + 1, template=template) as source:
        content, _ = source.content()
        found = []
        for row in source.read(lambda _: True):
            assert row is not None
            where = f"{file}: {row.place}"
            if not isinstance(row.request, ChatRequest) or row.error is not None:
                raise invalid(f"{where}: {row.error.message if row.error else ''}", "few_shot")
            target = row.request.job.target
            if target is None:
                raise invalid(f"{where}: an example has no target, its answer", "few_shot")
            answer = Message(role="assistant", content=target)
            found.append(Example(row.request.messages, answer))
    if len(found) < count:
        raise invalid(
            f"{file} has {counted(len(found), 'row')}, and {count} are wanted", "few_shot"
        )
    return Examples(found, count, content)


def sample_seed(seed: int, row: int, repeat: int) -> int:
    """The seed of one sample of a row: another one for each."""
    digest = hashlib.blake2b(f"{seed}/{row}/{repeat}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def with_conventions(overrides: Overrides, files: list[Path]) -> Overrides:
    """The overrides with the names of the columns that hold prompt and target, if no column has the
    name of a field for the prompt. Raises InvalidRequest."""
    row = _first_row(files, overrides)
    if "body" in row:
        return overrides
    conventions: list[tuple[tuple[str, ...], str]] = []
    if not any(name in row for name in SOURCES):
        prompt, target = next((pair for pair in PAIRS if pair[0] in row), ("", ""))
        conventions += [((prompt,), "prompt"), ((target,), "target")]
    if overrides.mode == "choice":
        conventions += [(CHOICES, "choices"), (RIGHT_CHOICE, "target")]
    found: dict[str, str] = {}
    for columns, field in conventions:
        column = next((name for name in columns if name in row), None)
        if column is not None and field not in (*row, *found.values()):
            found[column] = field
    return replace(overrides, names={**found, **overrides.names})


def _first_row(files: list[Path], overrides: Overrides) -> dict[str, Any]:
    """The first row that is no error; empty if there is none."""
    with DataSet(files[:1], overrides) as first:
        for _, _, row in first._rows():
            if not isinstance(row, InvalidRequest):
                return row
    return {}


def _row_file(file: Any, path: Path, overrides: Overrides) -> RowFile:
    try:
        return RowFile(file, str(path), overrides.names)
    except InvalidRequest as error:
        raise invalid(f"{path}: {error.message}") from None


def _request_names() -> tuple[str, ...]:
    from jobs.cli.field_options import request_fields

    return request_fields()
