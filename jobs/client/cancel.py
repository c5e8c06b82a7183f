"""Cancelling a job: at once while it waits in its queue, by asking its worker while it runs."""

from __future__ import annotations

import json
import time
from itertools import chain
from typing import Any

from rq import Queue
from rq.job import Job as RQJob
from rq.registry import CanceledJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat

from jobs import keys
from jobs.client.state import CANCEL, ERROR, JobState, Status, look, unknown
from jobs.client.steps import Ask, Emit, Steps, command, reliably
from jobs.client.submit import FAILURE_SECONDS
from jobs.errors import JobError
from jobs.results import outbox
from jobs.stream.entries import END_LUA, end_id, end_payload

# KEYS: job, queue, canceled registry, log, live, results, outbox, outboxes.
# ARGV: id, expected attempt, error, outbox row, run, end id, end payload, ended at (RQ's format),
# now (seconds), seconds to keep, control channel, control message, result as field, value, …
# Answers "over", "cancelled", "asked", or "again" if the job ran since the row was made.
SCRIPT = (
    END_LUA
    + f"""
local status = redis.call('HGET', KEYS[1], 'status')
if not status or status == 'finished' or status == 'failed' or status == 'stopped'
  or status == 'canceled' then return 'over' end
if (redis.call('HGET', KEYS[1], 'chatjobs_attempt') or '0') ~= ARGV[2] then return 'again' end
if redis.call('LREM', KEYS[2], 1, ARGV[1]) == 0 then
  redis.call('HSET', KEYS[1], '{CANCEL}', 1)
  redis.call('PUBLISH', ARGV[11], ARGV[12])
  return 'asked'
end
local forget = ARGV[9] + ARGV[10]
redis.call('HSET', KEYS[1], 'status', 'canceled', 'ended_at', ARGV[8], '{ERROR}', ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[10])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', ARGV[9])
redis.call('ZADD', KEYS[3], forget, ARGV[1])
redis.call('XADD', KEYS[6], '*', unpack(ARGV, 13))
redis.call('EXPIRE', KEYS[6], ARGV[10])
redis.call('XADD', KEYS[7], '*', '{outbox.FIELD}', ARGV[4])
redis.call('SADD', KEYS[8], ARGV[5])
end_stream(KEYS[4], KEYS[5], ARGV[6], ARGV[7])
return 'cancelled'
"""
)


def cancel_steps(job_id: str) -> Steps[bool]:
    """Emits whether it had an effect: False for a job that is over already."""
    while True:
        state = yield from look(job_id, full=True)
        if state.status is Status.UNKNOWN:
            raise unknown(job_id)
        if state.status.over:
            yield Emit(False)
            return
        answer = yield from _try(state)
        if answer != b"again":
            yield Emit(answer != b"over")
            return


def _try(state: JobState) -> Ask[bytes]:
    error = JobError("cancelled", f"job {state.id} was cancelled before it was run")
    moment = time.time()
    entry = outbox.outbox_entry(
        state.id,
        state.request,
        "cancelled",
        attempt=state.attempt,
        error=error.to_dict(),
        enqueued_at=state.enqueued_at,
        finished_at=moment,
    )
    result = Result(
        state.id,
        Result.Type.STOPPED,
        connection=None,  # type: ignore[arg-type]
        exc_string=str(error),
        serializer=JSONSerializer,
    )
    names = [
        RQJob.key_for(state.id),
        Queue.redis_queue_namespace_prefix + state.queue,
        CanceledJobRegistry.key_template.format(state.queue),
        keys.log(state.id),
        keys.live(state.id),
        keys.results(state.id),
        keys.outbox(entry["run"]),
        keys.OUTBOXES,
    ]
    values: list[Any] = [
        state.id,
        state.attempt,
        json.dumps(error.to_dict()),
        outbox.encode(entry),
        entry["run"],
        end_id(state.attempt),
        end_payload("cancelled", error=error),
        utcformat(now()),
        int(moment),
        state.failure_ttl or FAILURE_SECONDS,
        keys.CONTROL,
        json.dumps({"op": "cancel", "job": state.id}),
        *chain.from_iterable(result.serialize().items()),
    ]
    answer: bytes = yield from reliably(command("eval", SCRIPT, len(names), *names, *values))
    return answer
