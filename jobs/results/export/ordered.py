"""The rows of a run in the order of the data set, with the memory of a part of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow.compute as pc

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


def ordered_tables(results: Results, run: str, columns: Sequence[str]) -> Iterator[Any]:
    """The rows of a run as pyarrow.Tables with these columns. All rows of one row of the data set
    are in one table."""
    rows = results.dataset(run)
    indices = pc.unique(rows.to_table(["row_index"])["row_index"])
    indices = indices.take(pc.sort_indices(indices))
    order = [(name, "ascending") for name in KEY]
    wanted = list(dict.fromkeys([*columns, *KEY]))
    for start in range(0, len(indices), CHUNK_ROWS):
        part = indices[start : start + CHUNK_ROWS]
        index = pc.field("row_index")
        table = rows.to_table(wanted, filter=(index >= part[0]) & (index <= part[-1]))
        yield table.sort_by(order).select(list(columns))
