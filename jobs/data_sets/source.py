"""A data set as its producer reads it: samples of rows, with numbers that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jobs.errors import JobError
from jobs.operations import Request

Wanted = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A sample of a row of a data set: its request, or why it has none. A row that is scored has a
    request with one item, which names the row. number: of the sample, from 0. row: index from 0.
    repeat: which sample of the row. place: for people, such as "line 17". size: bytes of the
    request, or of its item, as JSON. known: fields of the request of a row that has none."""

    number: int
    row: int
    repeat: int
    place: str
    request: Request | None
    error: JobError | None = None
    size: int = 0
    known: Mapping[str, Any] = field(default_factory=dict)


class RowSource(Protocol):
    """A data set that can be read several times, with the same rows. samples: of each row."""

    samples: int

    def read(self, wanted: Wanted) -> Iterator[SourceRow | None]:
        """One item for each sample; None for one that is not wanted. The numbers of all samples are
        those below their count. Raises InvalidRequest if the rest can't be read."""
