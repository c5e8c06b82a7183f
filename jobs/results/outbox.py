"""Outbox entries: the record of an ended job, kept in Redis until it is written to Parquet.

The script that settles a job (a worker's, or a client's that cancels a queued job) appends one
entry to the Redis stream `keys.outbox(run)` and adds `run` to the set `keys.OUTBOXES`. The stream
entry has one field, `row`: the JSON of an `OutboxEntry`. `jobs.operations.rows_of` converts it to
rows. It ignores unknown keys and reads missing ones as null, so that writers of different versions
can share an outbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from jobs.api.row_keys import given_repeat, given_row, hashed_row
from jobs.encoding import from_json, to_json
from jobs.keys import RUN_ID
from jobs.results.failures import Failure

VERSION = 1
FIELD = "row"  # the only field of the stream entry
DEFAULT_RUN = "default"  # run of jobs that name none

# Fields of a request that its row has also with `store: false`.
_STORED_FIELDS = frozenset(
    ("model", "store", "job", "n", "seed", "stream", "max_tokens", "temperature", "top_p", "top_k")
)

Status = Literal["ok", "error", "cancelled"]


class OutboxEntry(TypedDict):
    """The JSON form. Writers set all keys. Times are seconds since the epoch."""

    v: int  # VERSION
    job_id: str
    operation: str  # name of the Operation; see `operation_of`
    run: str
    row_index: int  # unique in the run; see `row_index_of`
    repeat_index: int  # which sample of the row; an older version writes none: 0
    attempt: int  # number of the attempt; 0: cancelled before the first
    status: Status
    request: dict[str, Any]  # JSON of the request, as submitted
    completion: dict[str, Any] | None  # JSON of the operation's result; partial unless ok
    error: dict[str, Any] | None  # JobError.to_dict(), unless ok
    failures: list[Failure]  # the failed attempts
    prompt_token_ids: list[int]
    output_token_ids: list[list[int]]  # per choice
    token_logprobs: list[list[float]]  # per choice, if requested
    details: list[dict[str, Any]]  # per choice: its share of usage.completion_tokens_details
    sampling: dict[str, Any] | None  # JSON of Sampling, with the defaults filled in
    seed: int | None  # seed used, given or drawn
    enqueued_at: float | None
    started_at: float | None  # first prefill
    first_token_at: float | None
    finished_at: float | None
    worker: str | None  # name of the worker
    host: str | None
    peak_memory_mb: int | None  # `Usage.peak_memory_mb`
    provenance: dict[str, Any] | None  # fields of the model's worker.backend.ModelInfo


def outbox_entry(
    job_id: str,
    request: dict[str, Any],
    status: Status,
    *,
    operation: str,
    attempt: int,
    completion: dict[str, Any] | None = None,
    error: dict[str, Any] | None = None,
    failures: Sequence[Failure] = (),
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[Sequence[int]] = (),
    token_logprobs: Sequence[Sequence[float]] = (),
    details: Sequence[dict[str, Any]] = (),
    sampling: dict[str, Any] | None = None,
    seed: int | None = None,
    enqueued_at: float | None = None,
    started_at: float | None = None,
    first_token_at: float | None = None,
    finished_at: float | None = None,
    worker: str | None = None,
    host: str | None = None,
    peak_memory_mb: int | None = None,
    provenance: dict[str, Any] | None = None,
) -> OutboxEntry:
    """The entry of an ended job; run and row index come from its request.

    With `store: false` in the request it has neither the prompt nor the answer.
    """
    run, row_index = run_of(request), row_index_of(job_id, request)
    if request.get("store") is False:
        request = {name: request[name] for name in request.keys() & _STORED_FIELDS}
        request["job"] = {k: v for k, v in _options(request).items() if k != "target"}
        completion = _without_content(completion)
        prompt_token_ids = output_token_ids = token_logprobs = ()
    return OutboxEntry(
        v=VERSION,
        job_id=job_id,
        operation=operation,
        run=run,
        row_index=row_index,
        repeat_index=repeat_of(request),
        attempt=attempt,
        status=status,
        request=request,
        completion=completion,
        error=error,
        failures=list(failures),
        prompt_token_ids=list(prompt_token_ids),
        output_token_ids=[list(ids) for ids in output_token_ids],
        token_logprobs=[list(values) for values in token_logprobs],
        details=list(details),
        sampling=sampling,
        seed=seed,
        enqueued_at=enqueued_at,
        started_at=started_at,
        first_token_at=first_token_at,
        finished_at=finished_at,
        worker=worker,
        host=host,
        peak_memory_mb=peak_memory_mb,
        provenance=provenance,
    )


def _without_content(completion: dict[str, Any] | None) -> dict[str, Any] | None:
    if completion is None:
        return None
    choices = [
        {
            "index": choice["index"],
            "finish_reason": choice["finish_reason"],
            "message": {"role": "assistant", "content": None},
        }
        for choice in completion["choices"]
    ]
    return {**completion, "choices": choices, "prompt_logprobs": None}


def encode(entry: OutboxEntry, completion: str | None = None) -> str:
    """JSON text for the stream entry's field `row`. `completion`: the JSON text of its completion,
    if there is one already."""
    if completion is None:
        return to_json(entry)
    rest = {name: value for name, value in entry.items() if name != "completion"}
    return f'{to_json(rest)[:-1]},"completion":{completion}}}'


def decode(value: str | bytes) -> OutboxEntry:
    """The entry that `encode` wrote. Raises ValueError unless it is a JSON object."""
    entry = from_json(value)
    if not isinstance(entry, dict):
        raise ValueError(f"an outbox entry is a JSON object, got {value[:60]!r}")
    return entry  # type: ignore[return-value]


def operation_of(entry: OutboxEntry) -> str:
    """The name of the operation of an entry; one of 0.2.0 or before has none: a chat."""
    name = entry.get("operation")
    return name if isinstance(name, str) else "chat"


def run_of(request: dict[str, Any]) -> str:
    """The run of a request; DEFAULT_RUN if it names none or an invalid one."""
    run = _options(request).get("run")
    return run if isinstance(run, str) and RUN_ID.fullmatch(run) else DEFAULT_RUN


def row_index_of(job_id: str, request: dict[str, Any]) -> int:
    """Row index in the run: `request.job.row`, else a hash of the job id.

    Hashed indexes can't collide with given ones and are the same for each attempt, so that the key
    of a row stays unique.
    """
    row = given_row(request.get("job"))
    return hashed_row(job_id) if row is None else row


def repeat_of(request: Mapping[str, Any]) -> int:
    """Which sample of its row a request is; 0 if it names none or an invalid one."""
    return given_repeat(request.get("job"))


def _options(request: Mapping[str, Any]) -> dict[str, Any]:
    options = request.get("job")
    return options if isinstance(options, dict) else {}
