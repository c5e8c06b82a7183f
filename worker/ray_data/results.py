"""Outcomes of requests → rows with the columns of `chatjobs run`, beside the columns of the data
set."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from jobs import clock
from jobs.errors import JobError
from jobs.operations import CHAT, SCORE, operation_for, rows_of
from jobs.results.files import table_of
from jobs.results.outbox import OutboxEntry, outbox_entry
from worker.backend import Outcome
from worker.ray_data.rows import BatchRow, ErrorRow


def results_of(
    batch: pa.Table,
    kept: Sequence[str],
    rows: Sequence[BatchRow],
    outcomes: Sequence[Outcome],
    provenance: Mapping[str, Any],
) -> pa.Table:
    """The results of a batch, in its order; a row that asks for several has them one behind the
    other. `kept`: columns of the batch that they have as well. `provenance`: of the model."""
    found = [
        rows_of(_entry(row, outcome, provenance))
        for row, outcome in zip(rows, outcomes, strict=True)
    ]
    columns = batch.select(kept)
    if any(len(of_row) != 1 for of_row in found):
        columns = columns.take([place for place, of_row in enumerate(found) for _ in of_row])
    results = table_of(result for of_row in found for result in of_row)
    schema = pa.schema([*columns.schema, *results.schema])
    return pa.Table.from_arrays([*columns.columns, *results.columns], schema=schema)


def _entry(row: BatchRow, outcome: Outcome, provenance: Mapping[str, Any]) -> OutboxEntry:
    if isinstance(row, ErrorRow):
        return outbox_entry(
            row.job_id,
            dict(row.fields),
            "error",
            operation=(SCORE if "items" in row.fields else CHAT).name,
            attempt=0,
            error=_error_of(row.error),
            finished_at=clock.now(),
        )
    request, error = row.request, outcome.error
    answer, sampling = outcome.result or outcome.partial, outcome.sampling
    return outbox_entry(
        row.job_id,
        request.to_dict(),
        "ok" if error is None else "error",
        operation=operation_for(request).name,
        attempt=1,
        completion=None if answer is None else answer.to_dict(),
        error=_error_of(error),
        prompt_token_ids=outcome.prompt_token_ids,
        output_token_ids=outcome.output_token_ids,
        token_logprobs=outcome.token_logprobs,
        details=[one.to_dict() for one in outcome.details],
        sampling=None if sampling is None else sampling.to_dict(),
        seed=outcome.seed,
        started_at=outcome.started_at,
        first_token_at=outcome.first_token_at,
        finished_at=outcome.finished_at or clock.now(),
        host=socket.gethostname(),
        peak_memory_mb=answer.usage.peak_memory_mb if answer and answer.usage else None,
        provenance=dict(provenance),
    )


def _error_of(error: JobError | None) -> dict[str, Any] | None:
    return None if error is None else error.to_dict()
