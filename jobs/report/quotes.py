"""The few rows that a page shows in full: the slowest, the failed, the first prompts.

Their keys are found among the numbers of the run; only their texts are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobs.report.measures import Measures
from jobs.results.files import Results
from jobs.results.scores import KEY

SLOWEST, FAILED, FIRST = 10, 20, 3
SHOWN_START, SHOWN_END = 1500, 500  # characters of a long text
COLUMNS = (
    *KEY, "custom_id", "status", "operation", "messages", "prompt", "continuation", "tools",
    "target", "text", "reasoning", "tool_calls", "finish_reason", "picked_index", "logprob_sum",
    "input_tokens", "output_tokens", "attempt", "ttft_s", "queue_s", "duration_s", "error_type",
    "error_message", "error_retryable",
)  # fmt: skip

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Clipped:
    """A text, or its start and its end and how many characters are between them."""

    start: str
    hidden: int = 0
    end: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message as the page shows it: a role and a text."""

    role: str
    text: Clipped


@dataclass(frozen=True, slots=True)
class Quote:
    """A row. `prompt`: the messages of a chat, else the text of the prompt. `row`: its columns."""

    name: str
    prompt: tuple[Turn, ...]
    answer: Clipped | None
    row: Row


def slowest(results: Results, run: str, measures: Measures) -> list[Quote]:
    """The rows that ran longest, the longest first."""
    table = measures.table.filter(measures.table["duration_s"].is_valid())
    return _quotes(results, run, table.sort_by([("duration_s", "descending")])[:SLOWEST])


def failed(results: Results, run: str, measures: Measures) -> list[Quote]:
    """The first rows that failed or were cancelled."""
    table = measures.table.filter(pc.not_equal(measures.table["status"], "ok"))
    return _quotes(results, run, _in_order(table)[:FAILED])


def first(results: Results, run: str, measures: Measures) -> list[Quote]:
    """The first rows of the data set, one choice of each."""
    table = measures.table
    ones = pc.and_(pc.equal(table["choice_index"], 0), pc.equal(table["repeat_index"], 0))
    return _quotes(results, run, _in_order(table.filter(ones))[:FIRST])


def clip(text: str | None) -> Clipped:
    text = text or ""
    hidden = len(text) - SHOWN_START - SHOWN_END
    if hidden <= 0:
        return Clipped(text)
    return Clipped(text[:SHOWN_START], hidden, text[-SHOWN_END:])


def _in_order(table: Any) -> Any:
    return table.sort_by([(name, "ascending") for name in KEY])


def _quotes(results: Results, run: str, chosen: Any) -> list[Quote]:
    """The rows with the keys of a table, in its order."""
    keys = [tuple(one.values()) for one in chosen.select(KEY).to_pylist()]
    if not keys:
        return []
    indices = pa.array(sorted({key[0] for key in keys}), pa.int64())
    rows = results.dataset(run).to_table(list(COLUMNS), filter=pc.field("row_index").isin(indices))
    wanted = set(keys)
    found = {}
    for batch in rows.to_batches(max_chunksize=256):
        for row in batch.to_pylist():
            key = tuple(row[name] for name in KEY)
            if key in wanted:
                found[key] = row
    return [_quote(found[key]) for key in keys if key in found]


def _quote(row: Row) -> Quote:
    name = row["custom_id"] if row["custom_id"] is not None else _number(row)
    return Quote(name, tuple(_turns(row)), _answer(row), row)


def _number(row: Row) -> str:
    """The place of a row in its data set, with its sample and choice."""
    parts = [f"row {row['row_index']}"]
    parts += [f"sample {row['repeat_index']}"] if row["repeat_index"] else []
    parts += [f"choice {row['choice_index']}"] if row["choice_index"] else []
    return ", ".join(parts)


def _turns(row: Row) -> Sequence[Turn]:
    turns = []
    if row["tools"]:
        turns.append(Turn("tools", clip(row["tools"])))
    if row["prompt"] is not None:
        turns.append(Turn("prompt", clip(row["prompt"])))
    for message in row["messages"] or ():
        text = "\n".join(
            part for part in (message["reasoning_content"], message["content"]) if part
        )
        for call in message["tool_calls"] or ():
            text += f"\n{_call(call)}"
        turns.append(Turn(message["role"] or "message", clip(text.strip("\n"))))
    if row["continuation"] is not None:
        turns.append(Turn("continuation", clip(row["continuation"])))
    return turns


def _answer(row: Row) -> Clipped | None:
    parts = [row["text"] or "", *(_call(call) for call in row["tool_calls"] or ())]
    text = "\n".join(part for part in parts if part)
    return clip(text) if text or row["text"] is not None else None


def _call(call: Row) -> str:
    function = call["function"] or {}
    return f"{function.get('name') or 'function'}({function.get('arguments') or ''})"
