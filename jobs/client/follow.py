"""Follows a job's token stream to its end: the reader of `jobs.stream`.

Subscribe, wait for the acknowledgement, read the log, then take published entries and drop those
that the log already had. After a gap, a silence, the end entry or a lost connection, read the job's
state and then the log again. Only the state decides that the stream has ended; the completion then
supplies whatever the log no longer had. So a lost message neither loses a token nor blocks a
follower.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator

import redis
import redis.asyncio

from jobs import keys
from jobs.api.chunk import ChatChunk
from jobs.client.state import JobState, Status, read_outcome, read_state, unknown
from jobs.client.steps import (
    PAUSE_SECONDS,
    Call,
    Emit,
    Emitting,
    Steps,
    command,
    iterate_async,
    iterate_sync,
    retry,
)
from jobs.errors import JobError
from jobs.stream.cursor import StreamCursor
from jobs.stream.entries import Entry

SILENCE_SECONDS = 2.0  # without a message; then the job's state and the log are read again
ACKNOWLEDGE_SECONDS = 5.0  # limit for the reply to SUBSCRIBE
PAGE = 500  # log entries per read


def follow(
    client: redis.Redis, job_id: str, after: str | None = None, *, timeout: float | None = None
) -> Iterator[ChatChunk]:
    """Yields the chunks of a job from the start, or after the cursor of an earlier chunk.

    Raises JobError if the job fails, is cancelled or does not exist, and `timeout` if no chunk
    comes for `timeout` seconds.
    """
    return iterate_sync(follow_steps(job_id, after, timeout), client)


def follow_async(
    client: redis.asyncio.Redis,
    job_id: str,
    after: str | None = None,
    *,
    timeout: float | None = None,
) -> AsyncIterator[ChatChunk]:
    """Like `follow`, with asyncio."""
    return iterate_async(follow_steps(job_id, after, timeout), client)


def follow_steps(
    job_id: str, after: str | None, timeout: float | None = None
) -> Emitting[ChatChunk]:
    """The steps that `follow` and `follow_async` share."""
    silence = SILENCE_SECONDS if timeout is None else min(SILENCE_SECONDS, timeout)
    position, since = (0, 0), time.monotonic()
    state = yield from read_state(job_id, full=True)
    cursor = StreamCursor(job_id, state.request, int(state.created_at), after)
    subscribed = False
    while True:
        if not subscribed:
            subscribed = yield from _subscribe(keys.live(job_id))
        state = yield from _catch_up(cursor, job_id)
        if state.status.over:
            break
        if cursor.position != position:
            position, since = cursor.position, time.monotonic()
        elif timeout is not None and time.monotonic() - since >= timeout:
            raise JobError(
                "timeout", f"no chunk of job {job_id} for {timeout:g} s (status: {state.status})"
            )
        if subscribed:
            subscribed = yield from _follow_live(cursor, job_id, silence)
        else:
            yield lambda connection: connection.sleep(PAUSE_SECONDS)
    completion = yield from read_outcome(state)
    for chunk in cursor.complete(completion, state.attempt):
        yield Emit(chunk)


def _subscribe(channel: str) -> Steps[bool]:
    """Returns whether Redis has acknowledged the subscription."""
    yield lambda connection: connection.close_pubsub()
    yield from retry(lambda connection: connection.pubsub.subscribe(channel))
    try:
        message = yield _listen(ACKNOWLEDGE_SECONDS)
    except (redis.ConnectionError, redis.TimeoutError):
        return False
    return message is not None and message["type"] == "subscribe"


def _catch_up(cursor: StreamCursor, job_id: str) -> Steps[JobState]:
    """Emit the log's entries after the cursor. Returns the job's state from before the read.

    If that state is final, the log was complete when it was read.
    """
    state = yield from read_state(job_id)
    if state.status is Status.UNKNOWN:
        raise unknown(job_id)
    while True:
        attempt, seq = cursor.position
        step = command("xrange", keys.log(job_id), min=f"({attempt}-{seq}", count=PAGE)
        page = yield from retry(step)
        for entry_id, fields in page:
            entry = Entry.from_wire(job_id, entry_id.decode(), json.loads(fields[b"d"]))
            for chunk in cursor.take(entry):
                yield Emit(chunk)
        if len(page) < PAGE:
            return state


def _follow_live(cursor: StreamCursor, job_id: str, silence: float) -> Steps[bool]:
    """Emit entries as they are published, until the log must be read again: after a gap, or after
    `silence` seconds without a message. Returns False if the subscription is lost."""
    while True:
        try:
            message = yield _listen(silence)
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        if message is None or message["type"] != "message":
            return True  # silence, or the client library has resubscribed
        published = json.loads(message["data"])
        entry = Entry.from_wire(job_id, published["id"], published["d"])
        if entry.position <= cursor.position:
            continue
        if not cursor.is_next(entry.position):
            return True
        for chunk in cursor.take(entry):
            yield Emit(chunk)


def _listen(seconds: float) -> Call:
    return lambda connection: connection.pubsub.get_message(timeout=seconds)
