"""The job of a checked request: its id, its data in Redis, and the rows that it reserves.

Enqueueing sends it; the rows of files and of runs are compared with it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple

from jobs.api.row_keys import named_rows
from jobs.api.score_request import ScoreRequest
from jobs.operations import Operation, Request, operation_for
from jobs.results.outbox import run_of
from jobs.store.reservations import DIGEST_BYTES, NewRow, digest_of, row_job
from jobs.store.rq_layout import encode_call

_to_json = json.JSONEncoder(separators=(",", ":")).encode


class NewJob(NamedTuple):
    id: str
    request: Request
    operation: Operation
    run: str
    request_bytes: int
    message_bytes: int
    data: bytes
    digest: bytes  # of the content, of a request with rows
    rows: Sequence[NewRow]
    by_custom_id: bool = False  # custom_id identifies the row


def is_keyed(request: Request) -> bool:
    """True if custom_id identifies the row of the request; `job.row` is then a proposal."""
    options = request.job
    return options.run is not None and options.row is not None and options.custom_id is not None


def custom_id_digest(custom_id: str) -> bytes:
    """The field of a custom_id in its hash of rows."""
    return hashlib.blake2b(custom_id.encode(), digest_size=DIGEST_BYTES).digest()


def new_job(request: Request, *, by_custom_id: bool = False) -> NewJob:
    """`by_custom_id`: custom_id identifies the row of a request that has one."""
    content = request.to_dict()
    run, job_id = run_of(content), request.job.id
    keyed = by_custom_id and is_keyed(request)
    has_items = isinstance(request, ScoreRequest)
    named = named_rows(content)
    # All of it becomes JSON once: the sizes and the digests come from the texts of the job.
    name = "items" if has_items else "messages"
    listed = name in content
    parts = [_to_json(part) for part in content.pop(name, ())]
    options = content.pop("job")
    options.pop("id", None)
    common = _to_json(content)[1:-1]
    first = f'"{name}":[{",".join(parts)}],' if listed else ""
    text = f'{{{first}{common},"job":{_to_json(options)}}}'
    digest = b""
    if named:
        digest = digest_of(text + (job_id or ""))
        job_id = job_id or row_job(run, next(iter(named.values()))[0], digest)
    job_id = job_id or new_id()
    rows = [
        NewRow(row, repeat, digest_of(common + parts[place]) if has_items else digest)
        for place, (row, repeat) in named.items()
    ]
    comma = "," if options else ""
    text = f'{text[:-2]}{comma}"id":"{job_id}"}}}}'
    operation = operation_for(request)
    call, data = encode_call(operation.func, "request", text)
    longest = 0 if has_items else max(map(len, parts), default=0)
    return NewJob(
        id=job_id,
        request=request,
        operation=operation,
        run=run,
        request_bytes=len(call),
        message_bytes=longest,
        data=data,
        digest=digest,
        rows=rows,
        by_custom_id=keyed,
    )


def new_id() -> str:
    """A job id of 32 hex digits that sorts by creation time."""
    return f"{time.time_ns() // 1000:014x}{secrets.token_hex(9)}"
