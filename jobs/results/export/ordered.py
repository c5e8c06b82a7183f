"""The rows of a run, in the order of the data set or of their ends, with the memory of a part of
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow.compute as pc

from jobs.results.export.formats import Order
from jobs.results.files import Results
from jobs.results.scores import KEY

CHUNK_ROWS = 10_000  # of the data set, in memory at once

# What people read first; the other columns follow in the order of the schema.
COMMON_COLUMNS = (
    "row_index", "repeat_index", "choice_index", "custom_id", "status", "model", "messages",
    "prompt", "continuation", "target", "text", "reasoning", "tool_calls", "finish_reason",
    "logprob_sum", "is_greedy", "picked_index", "metadata", "input_tokens", "output_tokens",
    "error_type", "error_message",
)  # fmt: skip


def ordered_tables(
    results: Results, run: str, columns: Sequence[str], order: Order = "input"
) -> Iterator[Any]:
    """The rows of a run as pyarrow.Tables with these columns. All rows of one row of the data set
    are in one table."""
    rows = results.dataset(run)
    indices = _indices(rows, order)
    wanted = list(dict.fromkeys([*columns, *KEY]))
    by_place = [(name, "ascending") for name in ("place", *KEY)]
    for start in range(0, len(indices), CHUNK_ROWS):
        part = indices[start : start + CHUNK_ROWS]
        index, bounds = pc.field("row_index"), pc.min_max(part)
        inside = (index >= bounds["min"]) & (index <= bounds["max"]) & index.isin(part)
        table = rows.to_table(wanted, filter=inside)
        table = table.append_column("place", pc.index_in(table["row_index"], part))
        yield table.sort_by(by_place).select(list(columns))


def _indices(rows: Any, order: Order) -> Any:
    """The rows of the data set in their order: `done` is that in which their last samples ended."""
    if order == "input":
        indices = pc.unique(rows.to_table(["row_index"])["row_index"])
        return indices.take(pc.sort_indices(indices))
    table = rows.to_table(["row_index", "finished_at"])
    ends = table.group_by("row_index").aggregate([("finished_at", "max")])
    ends = ends.sort_by([("finished_at_max", "ascending"), ("row_index", "ascending")])
    return ends["row_index"].combine_chunks()
