"""A data set as its producer reads it: samples of rows, with numbers that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jobs.errors import JobError
from jobs.operations import Request

Wanted = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of a row of a data set. number: of the sample, from 0. row: index from 0. repeat:
    which sample of the row. place: for people, such as "line 17"."""

    number: int
    row: int
    repeat: int
    place: str


@dataclass(frozen=True, slots=True)
class RequestRow(Sample):
    """A sample that a job runs. A row that is scored has a request with one item, which names the
    row. size: bytes of the request, or of its item, as JSON."""

    request: Request
    size: int

    def refused(self, error: JobError) -> ErrorRow:
        """The same sample, which no job runs."""
        fields = self.request.to_dict()
        return ErrorRow(self.number, self.row, self.repeat, self.place, error, fields)


@dataclass(frozen=True, slots=True)
class ErrorRow(Sample):
    """A sample that no job runs. fields: of its request, as far as they are known."""

    error: JobError
    fields: Mapping[str, Any]


SourceRow = RequestRow | ErrorRow


class RowSource(Protocol):
    """A data set that can be read several times, with the same rows. samples: of each row."""

    samples: int

    def read(self, wanted: Wanted) -> Iterator[SourceRow | None]:
        """One item for each sample; None for one that is not wanted. The numbers of all samples are
        those below their count. Raises InvalidRequest if the rest can't be read."""
