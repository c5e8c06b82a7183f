"""Following a job's token stream to its end: the reader's end of `jobs.stream`.

Subscribe, wait for the acknowledgement, read the log, go on live, dropping what it has. On a gap, a
silence, the end entry or a lost connection the log is read again, after the job's state. That state
alone decides that the stream has ended; then the job's completion fills whatever the log no longer
had. So no message that gets lost can lose a token or keep a follower waiting.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

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
from jobs.stream.cursor import Position, StreamCursor, parse_position

SILENCE_SECONDS = 2.0  # without a message for so long, the log and the job's state are read again
ACKNOWLEDGE_SECONDS = 5.0
PAGE = 500  # entries of the log in one read


def follow(client: redis.Redis, job_id: str, after: str | None = None) -> Iterator[ChatChunk]:
    """The chunks of a job from its start, or after the cursor of a chunk that was read before.

    Raises JobError at the end if the job failed or was cancelled, or if there is no such job.
    """
    return iterate_sync(follow_steps(job_id, after), client)


def follow_async(
    client: redis.asyncio.Redis, job_id: str, after: str | None = None
) -> AsyncIterator[ChatChunk]:
    """The same with asyncio."""
    return iterate_async(follow_steps(job_id, after), client)


def follow_steps(job_id: str, after: str | None) -> Emitting[ChatChunk]:
    """The conversation behind both."""
    state = yield from read_state(job_id, full=True)
    cursor = StreamCursor(job_id, state.request, int(state.created_at), after)
    subscribed = False
    while True:
        if not subscribed:
            subscribed = yield from _subscribe(keys.live(job_id))
        state = yield from _catch_up(cursor, job_id)
        if state.status.over:
            break
        if subscribed:
            subscribed = yield from _go_on_live(cursor)
        else:
            yield lambda connection: connection.sleep(PAUSE_SECONDS)
    completion = yield from read_outcome(state)
    for chunk in cursor.complete(completion, state.attempt):
        yield Emit(chunk)


def _subscribe(channel: str) -> Steps[bool]:
    """Whether Redis has said that it sends us the channel's messages from now on."""
    yield lambda connection: connection.close_pubsub()
    yield from retry(lambda connection: connection.pubsub.subscribe(channel))
    try:
        message = yield _listen(ACKNOWLEDGE_SECONDS)
    except (redis.ConnectionError, redis.TimeoutError):
        return False
    return message is not None and message["type"] == "subscribe"


def _catch_up(cursor: StreamCursor, job_id: str) -> Steps[JobState]:
    """Emit what the log has beyond the cursor.

    The state is from before: if it says that the job is over, the log that follows is complete.
    """
    state = yield from read_state(job_id)
    if state.status is Status.UNKNOWN:
        raise unknown(job_id)
    while True:
        attempt, seq = cursor.position
        step = command("xrange", keys.log(job_id), min=f"({attempt}-{seq}", count=PAGE)
        page = yield from retry(step)
        for entry_id, fields in page:
            chunks = cursor.take(parse_position(entry_id.decode()), json.loads(fields[b"d"]))
            for chunk in chunks:
                yield Emit(chunk)
        if len(page) < PAGE:
            return state


def _go_on_live(cursor: StreamCursor) -> Steps[bool]:
    """Emit what arrives, until the log has to be asked. False: the subscription is lost."""
    while True:
        try:
            message = yield _listen(SILENCE_SECONDS)
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        if message is None or message["type"] != "message":
            return True  # silence, or the client library has subscribed anew
        position, payload = _parse(message["data"])
        if position <= cursor.position:
            continue
        if not cursor.is_next(position):
            return True
        for chunk in cursor.take(position, payload):
            yield Emit(chunk)


def _parse(data: bytes) -> tuple[Position, dict[str, Any]]:
    message = json.loads(data)
    return parse_position(message["id"]), message["d"]


def _listen(seconds: float) -> Call:
    return lambda connection: connection.pubsub.get_message(timeout=seconds)
