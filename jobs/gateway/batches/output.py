"""The output and the error file of a batch: one line for each line of its input, in one of the two.

They are made of the rows in Parquet, so they have the same bytes if they are made again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from jobs.encoding import to_json
from jobs.gateway.batches.forms import response_of
from jobs.gateway.batches.lines import Line, read_lines
from jobs.gateway.batches.stored import Outcome, StoredBatch
from jobs.gateway.files.stored import DATA, OUTPUT, FileStore
from jobs.results.export.openai_batch import Line as Row
from jobs.results.export.openai_batch import batch_lines
from jobs.results.files import Results

CANCELLED, EXPIRED = "batch_cancelled", "batch_expired"
# Of a line that has not run, by the end of its batch.
NOT_RUN: dict[Outcome, tuple[str, str]] = {
    "cancelled": (CANCELLED, "the batch was cancelled before this request had ended"),
    "expired": (EXPIRED, "the batch expired before this request had ended"),
    "failed": ("batch_failed", "the batch failed before this request had ended"),
    "completed": ("internal", "the answer of this request is in no file of its run"),
}


@dataclass(slots=True)
class Written:
    """The files, None without a line, and what is in them."""

    output_file_id: str | None = None
    error_file_id: str | None = None
    completed: int = 0
    failed: int = 0
    usage: dict[str, Any] = field(
        default_factory=lambda: {
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 0,
        }
    )

    def count(self, answer: dict[str, Any]) -> None:
        """Add the tokens of an answer."""
        found, usage = answer.get("usage") or {}, self.usage
        usage["input_tokens"] += found.get("prompt_tokens", 0)
        usage["output_tokens"] += found.get("completion_tokens", 0)
        usage["total_tokens"] += found.get("total_tokens", 0)
        prompt = found.get("prompt_tokens_details") or {}
        usage["input_tokens_details"]["cached_tokens"] += prompt.get("cached_tokens") or 0
        generated = found.get("completion_tokens_details") or {}
        usage["output_tokens_details"]["reasoning_tokens"] += generated.get("reasoning_tokens") or 0


def write_files(
    batch: StoredBatch, results: Results, files: FileStore, finalizing: dict[str, Any]
) -> Written:
    """Make both files, if they are not there, under the ids that `finalizing` has for them. Raises
    OSError, and InvalidRequest for a run with rows of others."""
    written = Written()
    with ExitStack() as stack:
        paths = [stack.enter_context(files.unfinished()) for _ in range(2)]
        output, errors = (stack.enter_context((path / DATA).open("wb")) for path in paths)
        for line, row in _rows(batch, results, finalizing["outcome"]):
            content = row.content
            if row.is_answer:
                written.completed += 1
                content = _answer(batch.asked.endpoint, line, row, written)
            else:
                written.failed += 1
            _write(output if row.is_answer else errors, content)
        for file in (output, errors):
            file.flush()
            os.fsync(file.fileno())
        if written.completed:
            written.output_file_id = _keep(batch, files, paths[0], finalizing, "output")
        if written.failed:
            written.error_file_id = _keep(batch, files, paths[1], finalizing, "error")
    return written


def _keep(
    batch: StoredBatch, files: FileStore, path: Path, finalizing: dict[str, Any], kind: str
) -> str:
    id: str = finalizing[f"{kind}_file_id"]
    name = f"{batch.id}_{kind}.jsonl"
    files.put(id, path, name, OUTPUT, finalizing["at"], batch.asked.output_seconds)
    return id


def _rows(batch: StoredBatch, results: Results, outcome: Outcome) -> Iterator[tuple[Line, Row]]:
    """The lines of both files, in the order of the input, each after that of the input."""
    known: Iterator[Row] = iter(())
    if batch.run in results.runs():
        known = batch_lines(results, batch.run)
    row = next(known, None)
    for line in read_lines(batch.input, batch.asked.endpoint):
        if not isinstance(line, Line):
            continue
        while row is not None and row.row < line.index:
            row = next(known, None)
        if row is not None and row.row == line.index:
            yield line, _of_row(row, line, outcome)
        else:
            yield line, _not_run(batch, line, outcome)


def _answer(endpoint: str, line: Line, row: Row, written: Written) -> dict[str, Any]:
    """An answer in the form of the endpoint, counted."""
    response = row.content["response"]
    written.count(response["body"])
    body = response_of(endpoint, line.body, response["body"], row.rows)
    return {**row.content, "response": {**response, "body": body}}


def _of_row(row: Row, line: Line, outcome: Outcome) -> Row:
    content = {**row.content, "custom_id": line.custom_id}
    error = content["error"]
    if outcome == "expired" and error is not None and error["code"] == CANCELLED:
        code, message = NOT_RUN[outcome]
        content["error"] = {"code": code, "message": message}
    return row._replace(content=content)


def _not_run(batch: StoredBatch, line: Line, outcome: Outcome) -> Row:
    code, message = NOT_RUN[outcome]
    content = {
        "id": f"batch_req_{batch.id.partition('_')[2]}_{line.index}",
        "custom_id": line.custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return Row(False, content, line.index)


def _write(file: BinaryIO, content: dict[str, Any]) -> None:
    file.write(to_json(content).encode() + b"\n")
