"""Reads a data set as `chatjobs run` would, without Redis: its rows, their errors and their tokens.

Memory: a few rows, however many the data set has.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from jobs.data_sets.source import ErrorRow
from jobs.errors import JobError

if TYPE_CHECKING:
    from jobs.data_sets.source import RequestRow, RowSource
    from jobs.operations import Request

KEPT_ERRORS = 10  # that are quoted
SEED = 0  # of the sample, which is the same in each call
TOO_LONG = "context_length_exceeded"


class Prompts(Protocol):
    """The prompts of a model, made by its own tokenizer and chat template.

    context_length: positions that the model has. obstacle: why this machine can't run the model, as
    `chatjobs models check` says it; None if it can. facts: of the model, as that command prints
    them with --json.
    """

    context_length: int
    obstacle: str | None
    facts: Mapping[str, Any]

    def read(self, request: Request) -> tuple[str, int]:
        """The text of a prompt, and its number of tokens. Of a request that scores one item: the
        text of the first sequence, and the tokens of the prompt and of all that is scored. Raises
        JobError."""


@dataclass(slots=True)
class Tokens:
    """Numbers of tokens of rows: of their prompts, and of what is scored."""

    rows: int = 0
    total: int = 0
    least: int = 0
    most: int = 0

    def add(self, count: int) -> None:
        self.least = min(self.least, count) if self.rows else count
        self.most = max(self.most, count)
        self.total += count
        self.rows += 1

    @property
    def mean(self) -> float:
        return self.total / self.rows if self.rows else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "min": self.least, "mean": self.mean, "max": self.most}


@dataclass(slots=True)
class Survey:
    """The rows of a data set. left: samples that are not done yet and may be answered. errors: rows
    that will fail, by error code. first_errors: sentences with their lines. sample: some rows,
    drawn from those that are left and that a job runs."""

    rows: int = 0
    left: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first_errors: list[str] = field(default_factory=list)
    tokens: Tokens = field(default_factory=Tokens)
    first_prompt: str | None = None
    sample: list[RequestRow] = field(default_factory=list)

    @property
    def too_long(self) -> int:
        """Number of rows whose prompts exceed the context."""
        return self.errors[TOO_LONG]

    def add_error(self, place: str, error: JobError) -> None:
        self.errors[error.code] += 1
        if len(self.first_errors) < KEPT_ERRORS:
            self.first_errors.append(f"{place}: {error.message}")


def survey(
    source: RowSource,
    models: Callable[[str], Prompts | str],
    is_done: Callable[[int], bool],
    sample_rows: int,
    progress: Callable[[int], None],
) -> Survey:
    """Read all rows. `models`: the prompts of a model by its name, or why they are not known.
    `is_done`: of the number of a sample. `sample_rows`: rows that are drawn. `progress` gets
    the number of rows that were read. Raises InvalidRequest if the data set can't be read to its
    end."""
    found, draw, candidates = Survey(), random.Random(SEED), 0
    for row in source.read(lambda number: number % source.samples == 0):
        if row is None:
            continue
        found.rows += 1
        progress(found.rows)
        if isinstance(row, ErrorRow):
            found.add_error(row.place, row.error)
            continue
        is_valid = _check(found, row, models)
        numbers = range(row.number, row.number + source.samples)
        left = sum(not is_done(number) for number in numbers)
        if not is_valid or not left:
            continue
        found.left += left
        place = candidates if candidates < sample_rows else draw.randrange(candidates + 1)
        candidates += 1
        if place < sample_rows:
            found.sample[place : place + 1] = [row]
    return found


def _check(found: Survey, row: RequestRow, models: Callable[[str], Prompts | str]) -> bool:
    """Count the tokens of a row. False if the row will fail."""
    prompts = models(row.request.model)
    if not isinstance(prompts, str):
        try:
            text, count = prompts.read(row.request)
        except JobError as error:
            found.add_error(row.place, error)
            return False
        found.tokens.add(count)
        if found.first_prompt is None:
            found.first_prompt = text
    return True
