"""Packs rows into jobs: a chat has a job of its own, many rows that are scored share one.

A pack is no more than seconds of work, since it is scored again as a whole if its worker dies. What
is done, failed or missing is counted by row, whatever a row is packed with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jobs.api.request import ChatRequest
from jobs.api.score_request import ScoreRequest
from jobs.data_sets.source import RequestRow
from jobs.operations import Request

PACK_ROWS = 64
PACK_BYTES = 16 * 1024  # of items as JSON: about 4,000 tokens
PACK_SEQUENCES = 1000  # continuations and windows, about; a job may have ten times as many
# Rows of one prompt stay in one pack up to this many times its limits.
MAX_OVERRUN = 4


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
    open_rows: list[RequestRow] = []
    size = sequences = 0
    for row in rows:
        packed = isinstance(row.request, ScoreRequest) and not is_alone(row.number)
        cost = row.request.cost if isinstance(row.request, ScoreRequest) else 1
        fits = packed and sequences + cost <= PACK_SEQUENCES
        if open_rows and not (fits and _fits(row, open_rows, size)):
            yield _pack(open_rows)
            open_rows, size, sequences = [], 0, 0
        if not packed:
            yield Pack(row.request, [row])
            continue
        open_rows.append(row)
        size += row.size
        sequences += cost
    if open_rows:
        yield _pack(open_rows)


def _fits(row: RequestRow, others: Sequence[RequestRow], size: int) -> bool:
    last = others[-1]
    if row.request.model != last.request.model:
        return False
    times = MAX_OVERRUN if prompt_of(row) == prompt_of(last) else 1
    return len(others) < times * PACK_ROWS and size + row.size <= times * PACK_BYTES


def _pack(rows: Sequence[RequestRow]) -> Pack:
    requests = [row.request for row in rows if isinstance(row.request, ScoreRequest)]
    items = [item for one in requests for item in one.items]
    return Pack(requests[0].model_copy(update={"items": items}), rows)
