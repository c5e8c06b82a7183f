"""Packs rows into jobs: a chat has a job of its own, many rows that are scored share one.

A pack is no more than seconds of work, since it is scored again as a whole if its worker dies. What
is done, failed or missing is counted by row, whatever a row is packed with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jobs.api.request import ChatRequest
from jobs.api.score_packs import Measure, PackLimits, packed
from jobs.api.score_request import ScoreRequest
from jobs.data_sets.source import RequestRow
from jobs.operations import Request

LIMITS = PackLimits(
    items=64,
    sequences=1000,  # about; a job may have ten times as many
    characters=16 * 1024,  # about 4,000 tokens
    overrun=4,  # so that rows of one prompt stay in one pack
)


class Pack(NamedTuple):
    """A request, and the rows that its job gives."""

    request: Request
    rows: Sequence[RequestRow]


def place_of(row: RequestRow) -> tuple[str, str]:
    """Key of the order in which rows are enqueued: those of a model one behind the other, since a
    script enqueues jobs of one queue, and of these those that begin alike."""
    return row.request.model, prompt_of(row)


def prompt_of(row: RequestRow) -> str:
    """The beginning of what the model sees of a row."""
    request = row.request
    if isinstance(request, ChatRequest):
        return "\n".join(f"{one.role}\n{one.text}" for one in request.messages)
    assert isinstance(request, ScoreRequest)
    item = request.items[0]
    return str(item.get("prompt", item.get("messages", item.get("text"))))


def packs(rows: Sequence[RequestRow], is_alone: Callable[[int], bool]) -> Iterator[Pack]:
    """The jobs of some rows, which are in the order of their prompts. Each row that is scored has a
    request with one item. `is_alone`: by the number of a row, whether it has a job of its own."""

    def measure(row: RequestRow) -> Measure:
        request = row.request
        if isinstance(request, ScoreRequest) and not is_alone(row.number):
            return Measure(request.model, prompt_of(row), request.cost, row.size)
        return Measure(row.number, "", 1, row.size)

    for pack in packed(rows, LIMITS, measure):
        yield Pack(_request_of(pack), pack)


def _request_of(rows: Sequence[RequestRow]) -> Request:
    requests = [row.request for row in rows]
    if len(requests) == 1:
        return requests[0]
    items = [item for one in requests if isinstance(one, ScoreRequest) for item in one.items]
    return requests[0].model_copy(update={"items": items})
