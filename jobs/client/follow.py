"""Follows a job's token stream to its end: the reader of `jobs.stream`.

Read the log, listen to the channel, read the log again once the subscription is acknowledged, then
take published entries and drop those that the log already had. After a gap, a silence, the end
entry or a lost connection, read the job's state and then the log again. Only the state decides that
the stream has ended; the completion then supplies whatever the log no longer had. So a lost message
neither loses a token nor blocks a follower.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from jobs import keys
from jobs.api.chunk import ChatChunk
from jobs.client.state import JobState, Status, read_outcome, read_state, unknown
from jobs.client.steps import (
    Connection,
    Emit,
    Emitting,
    Steps,
    command,
    iterate_async,
    iterate_sync,
    listen,
    next_events,
    retry,
)
from jobs.errors import JobError, WaitTimeout
from jobs.stream.cursor import StreamCursor
from jobs.stream.entries import Entry

SILENCE_SECONDS = 2.0  # without a message; then the job's state and the log are read again
PAGE = 500  # log entries per read
# What an entry that no worker has written raises.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def follow(
    connection: Connection, job_id: str, after: str | None = None, *, timeout: float | None = None
) -> Iterator[ChatChunk]:
    """Yields the chunks of a job from the start, or after the cursor of an earlier chunk.

    Raises JobError if the job fails, is cancelled or does not exist, and WaitTimeout if no chunk
    comes for `timeout` seconds.
    """
    return iterate_sync(follow_steps(job_id, after, timeout), connection)


def follow_async(
    connection: Connection,
    job_id: str,
    after: str | None = None,
    *,
    timeout: float | None = None,
) -> AsyncIterator[ChatChunk]:
    """Like `follow`, with asyncio."""
    return iterate_async(follow_steps(job_id, after, timeout), connection)


def follow_steps(
    job_id: str, after: str | None, timeout: float | None = None
) -> Emitting[ChatChunk]:
    """The steps that `follow` and `follow_async` share."""
    position, since = (0, 0), time.monotonic()
    state = yield from read_state(job_id, full=True)
    cursor = StreamCursor(job_id, state.request, int(state.created_at), after)
    mailbox: Any = None
    try:
        while True:
            state = yield from _catch_up(cursor, job_id)
            if state.status.over:
                try:
                    completion = yield from read_outcome(state)
                    break
                except JobError:
                    state = yield from read_state(job_id)
                    if state.status.over:
                        raise
                    continue  # Redis has lost the end in a crash: the job runs again
            if cursor.position != position:
                position, since = cursor.position, time.monotonic()
            elif timeout is not None and time.monotonic() - since >= timeout:
                raise WaitTimeout(
                    f"no chunk of job {job_id} for {timeout:g} s (status: {state.status})",
                )
            if mailbox is None:
                mailbox = yield listen([keys.live(job_id)], ends_only=False)
            yield from _follow_live(cursor, job_id, mailbox, timeout)
    finally:
        if mailbox is not None:
            mailbox.close()
    for chunk in cursor.complete(completion, state.attempt):
        yield Emit(chunk)


def _catch_up(cursor: StreamCursor, job_id: str) -> Steps[JobState]:
    """Emit the log's entries after the cursor. Returns the job's state from before the read.

    If that state is final, the log was complete when it was read. A state from before the end entry
    was written is read again, and so is the log.
    """
    while True:
        state = yield from read_state(job_id)
        if state.status is Status.UNKNOWN:
            raise unknown(job_id)
        ended = False
        size = PAGE
        while size == PAGE:
            attempt, seq = cursor.position
            step = command("xrange", keys.log(job_id), min=f"({attempt}-{seq}", count=PAGE)
            page = yield from retry(step)
            size = len(page)
            for entry_id, fields in page:
                entry = _entry(job_id, entry_id, fields.get(b"d"))
                if entry is None:
                    raise JobError(
                        "internal",
                        f"the stream of job {job_id} can't be read: another program has written "
                        f"the entry {entry_id.decode()} of {keys.log(job_id)}; job.result() has "
                        "the answer",
                    )
                ended = entry.is_end
                for chunk in cursor.take(entry):
                    yield Emit(chunk)
        if state.status.over or not ended:
            return state


def _follow_live(
    cursor: StreamCursor, job_id: str, mailbox: Any, timeout: float | None
) -> Steps[None]:
    """Emit entries as they are published, until the log must be read: after an acknowledged
    subscription, a gap, or a silence."""
    limit = math.inf if timeout is None else timeout
    while events := (yield next_events(mailbox, limit, SILENCE_SECONDS)):
        for event in events:
            if event.data is None:
                return
            entry = _published(job_id, event.data)
            if entry is None:  # anyone may publish: the log has what counts
                return
            if entry.position <= cursor.position:
                continue
            if not cursor.is_next(entry.position):
                return
            for chunk in cursor.take(entry):
                yield Emit(chunk)


def _entry(job_id: str, entry_id: bytes, data: bytes | None) -> Entry | None:
    """An entry of the log; None for one that no worker has written."""
    try:
        return Entry.from_wire(job_id, entry_id.decode(), json.loads(data or b""))
    except UNREADABLE:
        return None


def _published(job_id: str, data: bytes) -> Entry | None:
    """The entry in a message; None for a message of another program."""
    try:
        published = json.loads(data)
        return Entry.from_wire(job_id, published["id"], published["d"])
    except UNREADABLE:
        return None
