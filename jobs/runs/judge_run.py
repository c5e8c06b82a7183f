"""The questions that a judge gets about the samples of a run, as a data set, and its verdicts.

The judge's answers are a run of their own, with one row for each sample: a scoring that was killed
goes on, and no answer is asked for twice. `metadata` of a row names its sample, and the attempt
that made its answer: a sample that was generated again is asked about again.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from jobs.api.request import ChatRequest
from jobs.data_sets.row_templates import MAX_BROKEN, BrokenTemplate
from jobs.data_sets.source import ErrorRow, RequestRow, SourceRow, Wanted
from jobs.errors import InvalidRequest, JobError, invalid
from jobs.results.files import Results
from jobs.results.scores import KEY
from jobs.runs.row_set import RowSet
from jobs.runs.written_rows import WrittenRows
from jobs.scores.judge import COLUMNS, Judge, template_values, verdict_of
from jobs.scores.outcome import MAX_TEXT, shortened
from jobs.scores.targets import Targets
from jobs.sizes import counted

Render = Callable[[Mapping[str, Any]], str]  # values → the prompt; raises InvalidRequest

SAMPLE = (*KEY, "model", "job_id", "attempt")  # in the metadata of a judge's row
UNANSWERED = "unanswered"  # there, of a sample without an answer
FIRST_ROWS = 100  # with an answer, that are rendered before the first question is asked
BATCH_ROWS = 256


class Questions:
    """The samples of a run as requests to a judge: a `RowSource`. A sample keeps the number that it
    has in the files of the judge's run. It reads the files that both runs have when it is made."""

    samples = 1

    def __init__(
        self,
        results: Results,
        run: str,
        judge: Judge,
        render: Render,
        targets: Targets | None = None,
    ) -> None:
        """`targets`: instead of those of the run."""
        self._judge, self._render, self._targets = judge, render, targets
        self._results, self.name = results, judge.run_of(run)
        self._rows = results.dataset(run)
        self._numbers = _Numbers(self._rows, self._known())

    def __len__(self) -> int:
        return len(self._numbers)

    def check(self) -> None:
        """Raise InvalidRequest if none of the first samples makes a valid request, or if the
        template is too slow for several."""
        answered = (row for row in self._samples() if _is_answered(row))
        errors: list[JobError] = []
        count = broken = 0
        for count, row in enumerate(islice(answered, FIRST_ROWS), start=1):
            one = self._question(0, row)
            if isinstance(one, ErrorRow):
                errors.append(one.error)
                broken += isinstance(one.error, BrokenTemplate)
            if broken == MAX_BROKEN:
                raise invalid(
                    f"{errors[-1].message}, for {broken} of the first {counted(count, 'answer')}: "
                    "correct the template of the judge",
                    "metric",
                )
        if errors and len(errors) == count:
            raise invalid(f"no answer can be judged: {errors[0].message}", "metric")

    def read(self, wanted: Wanted) -> Iterator[SourceRow | None]:
        for row in self._samples():
            number = self._numbers.find(row)
            yield self._question(number, row) if wanted(number) else None

    def outdated(self, written: WrittenRows) -> RowSet:
        """The rows to ask for again: those that failed, unless their sample has no answer, and
        those about an answer that has been replaced."""
        found = RowSet()
        if self.name not in self._results.runs():
            return found
        columns = ["row_index", "status", "metadata"]
        for batch in self._results.dataset(self.name).to_batches(columns=columns):
            for row in batch.to_pylist():
                sample = json.loads(row["metadata"] or "{}")
                number = written.number_of(row["row_index"], 0)
                failed = row["status"] != "ok" and UNANSWERED not in sample
                if number is not None and (failed or not self._numbers.has(number, sample)):
                    found.add(number)
        return found

    def _known(self) -> dict[int, int]:
        """The numbers of the judge's run, by the digests of their samples."""
        if self.name not in self._results.runs():
            return {}
        return {
            _digest(json.loads(row["metadata"] or "{}")): row["row_index"]
            for batch in self._results.dataset(self.name).to_batches(
                columns=["row_index", "metadata"], batch_size=BATCH_ROWS
            )
            for row in batch.to_pylist()
        }

    def _samples(self) -> Iterator[dict[str, Any]]:
        columns = list(dict.fromkeys((*COLUMNS, *SAMPLE, "status")))
        for batch in self._rows.to_batches(columns=columns, batch_size=BATCH_ROWS):
            yield from batch.to_pylist()

    def _question(self, number: int, row: dict[str, Any]) -> SourceRow:
        place = f"row {row['row_index']}"
        sample = {name: str(row[name]) for name in SAMPLE}
        fields: dict[str, Any] = {
            **self._judge.fields,
            "model": self._judge.model,
            "metadata": sample,
            "job": {"run": self.name, "row": number, "priority": "bulk"},
        }
        error: JobError | None = None
        prompt = ""
        if not _is_answered(row):
            sample[UNANSWERED] = row["status"]
            error = invalid("there is no answer to judge")
        else:
            try:
                if self._targets is not None:
                    row = {**row, "target": self._targets.of(row)}
                prompt = self._render(template_values(row))
            except InvalidRequest as failure:
                error = failure
        try:
            request = ChatRequest.parse(
                {**fields, "messages": [{"role": "user", "content": prompt or "-"}]}
            )
        except InvalidRequest as failure:
            return ErrorRow(number, number, 0, place, failure, fields)
        if error is not None:
            return ErrorRow(number, number, 0, place, error, request.to_dict())
        return RequestRow(number, number, 0, place, request, len(prompt.encode()))


def judged_rows(results: Results, name: str, run: str) -> Iterator[dict[str, Any]]:
    """The rows of the table of scores of a run: what its judge says of each sample. `name`: of the
    judge's run, which has ended."""
    columns = ["metadata", "status", "text", "error_type", "error_message"]
    for batch in results.dataset(name).to_batches(columns=columns, batch_size=BATCH_ROWS):
        for row in batch.to_pylist():
            sample = json.loads(row["metadata"])
            key = {one: int(sample[one]) for one in KEY}
            yield {"run_id": run, "model": sample["model"], **key, **_verdict(row, sample)}


def _verdict(row: dict[str, Any], sample: Mapping[str, str]) -> dict[str, Any]:
    """What a judge's row says, as columns of the table of scores."""
    if UNANSWERED in sample:
        return {"status": "no_answer"}
    if row["status"] != "ok":
        error = f"the judge failed: {row['error_message']} ({row['error_type']})"
        return {"status": "error", "error": error}
    try:
        found = verdict_of(row["text"] or "")
    except ValueError as error:
        explanation = shortened(row["text"], MAX_TEXT)
        return {"status": "error", "error": str(error), "explanation": explanation}
    return {
        "status": "ok",
        "value": found.value,
        "label": found.label,
        "explanation": shortened(found.explanation, MAX_TEXT),
    }


def _is_answered(row: Mapping[str, Any]) -> bool:
    return row["status"] == "ok" and row["text"] is not None


class _Numbers:
    """The numbers of samples: the one that a sample has in the judge's run, and else the next that
    is free, by the order of keys. So those of a run that goes on get numbers behind its first ones.

    32 bytes for each sample stay; while it is made, also the table of their keys and jobs, and a
    dict of those that the judge's run has.
    """

    def __init__(self, rows: Any, known: Mapping[int, int]) -> None:
        """`rows`: the pyarrow.dataset of a run. `known`: numbers of the judge's run, by digest."""
        table = rows.to_table(columns=list(SAMPLE))
        table = table.sort_by([(name, "ascending") for name in KEY])
        self._rows, self._places = array("q"), array("q")  # by the order of keys
        digests = array("Q")
        for batch in table.to_batches(max_chunksize=BATCH_ROWS):
            for row in batch.to_pylist():
                self._rows.append(row["row_index"])
                self._places.append(_place(row))
                digests.append(_digest(row))
        count = len(digests)
        self._numbers = array("q", [-1]) * count  # by the order of keys
        self._digests = array("Q", [0]) * count  # by number
        is_taken = bytearray(count)
        for at, digest in enumerate(digests):
            number = known.get(digest, count)
            if number < count and not is_taken[number]:
                self._numbers[at], is_taken[number] = number, 1
        free = (number for number in range(count) if not is_taken[number])
        for at, digest in enumerate(digests):
            if self._numbers[at] < 0:
                self._numbers[at] = next(free)
            self._digests[self._numbers[at]] = digest

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, row: Mapping[str, Any]) -> int:
        """The number of a sample."""
        first = bisect_left(self._rows, row["row_index"])
        return self._numbers[self._places.index(_place(row), first)]

    def has(self, number: int, sample: Mapping[str, Any]) -> bool:
        """True if the sample of this number is the one of a judge's row."""
        return number < len(self._digests) and self._digests[number] == _digest(sample)


def _place(row: Mapping[str, Any]) -> int:
    """The place of a sample among those of its row."""
    return int(row["repeat_index"]) << 16 | int(row["choice_index"])


def _digest(sample: Mapping[str, Any]) -> int:
    """A digest of the key of a sample and of the attempt that made its answer. Values may be
    text."""
    text = "/".join(str(sample.get(name)) for name in SAMPLE)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
