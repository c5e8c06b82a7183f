"""Follows a job's token stream to its end: the reader of `jobs.stream`.

Read the log, listen to the channel, read the log again once the subscription is acknowledged, then
take published entries and drop those that the log already had. After a gap, a silence, the end
entry or a lost connection, read the job's state and then the log again. Only the state decides that
the stream has ended; the completion then supplies whatever the log no longer had. So a lost message
neither loses a token nor blocks a follower.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal, TypeAlias, get_args

from jobs import keys
from jobs.api.chunk import ChatChunk
from jobs.api.wire import describe
from jobs.client.cause import cause_of_wait
from jobs.client.wait import GOES_ON, SILENCE_SECONDS, check_timeout
from jobs.encoding import from_json
from jobs.errors import JobError, StreamRestarted, WaitTimeout, invalid
from jobs.store.connection.protocol import (
    Connection,
    Emit,
    Emitting,
    Steps,
    iterate_async,
    iterate_sync,
    listen,
    next_events,
)
from jobs.store.job_state import (
    JobState,
    Status,
    completion_of,
    read_outcome,
    read_state,
    unknown,
)
from jobs.store.stream import read_log
from jobs.stream.cursor import StreamCursor
from jobs.stream.entries import Entry

PAGE = 500  # log entries per read
# Raised by entries that no worker has written.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)

OnRestart: TypeAlias = Literal["raise", "reset"]


class _Patience:
    """The time limit of a follower for the next output: `seconds`, or none if they are None. The
    time that its caller takes for a chunk does not count."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.renew()

    def renew(self) -> None:
        """There was output, or the caller asks for the next chunk."""
        self.deadline = None if self.seconds is None else time.monotonic() + self.seconds

    def left(self) -> float:
        return math.inf if self.deadline is None else self.deadline - time.monotonic()


def follow(
    connection: Connection,
    job_id: str,
    after: str | None = None,
    *,
    timeout: float | None = None,
    on_restart: OnRestart = "raise",
) -> Iterator[ChatChunk]:
    """Yields the chunks of a job, see `Job.stream`."""
    return iterate_sync(follow_steps(job_id, after, timeout, on_restart), connection)


def follow_async(
    connection: Connection,
    job_id: str,
    after: str | None = None,
    *,
    timeout: float | None = None,
    on_restart: OnRestart = "raise",
) -> AsyncIterator[ChatChunk]:
    """Like `follow`, with asyncio."""
    return iterate_async(follow_steps(job_id, after, timeout, on_restart), connection)


def check_stream(timeout: float | None, on_restart: OnRestart) -> None:
    """Raises InvalidRequest for an argument that no stream takes."""
    check_timeout(timeout)
    if on_restart not in get_args(OnRestart):
        raise invalid(f"on_restart: raise or reset, got {describe(on_restart)}", "on_restart")


def follow_steps(
    job_id: str,
    after: str | None = None,
    timeout: float | None = None,
    on_restart: OnRestart = "raise",
) -> Emitting[ChatChunk]:
    """The steps that `follow` and `follow_async` share."""
    check_stream(timeout, on_restart)
    patience = _Patience(timeout)
    for_resets = on_restart == "reset"
    state = yield from read_state(job_id, full=True, deadline=patience.deadline)
    cursor = StreamCursor(job_id, state.request, int(state.created_at), after)
    mailbox: Any = None
    try:
        while True:
            state = yield from _catch_up(cursor, job_id, patience, for_resets)
            if state.status.over:
                try:
                    completion = completion_of(job_id, (yield from read_outcome(state)))
                    break
                except JobError:
                    # Redis may have lost the end in a crash: the job runs again, or has ended again
                    # since its state was read.
                    state = yield from read_state(job_id)
                    if not state.status.over:
                        continue
                    completion = completion_of(job_id, (yield from read_outcome(state)))
                    break
            if patience.left() <= 0:
                why = yield from cause_of_wait(job_id)
                raise WaitTimeout(
                    f"no chunk of job {job_id} for {patience.seconds:g} s "
                    f"(status: {state.status}){why}{GOES_ON}"
                )
            if mailbox is None:
                mailbox = yield listen([keys.live(job_id)], ends_only=False)
            yield from _follow_live(cursor, job_id, mailbox, patience, for_resets)
    finally:
        if mailbox is not None:
            mailbox.close()
    yield from _give(cursor.complete(completion, state.attempt), job_id, patience, for_resets)


def _catch_up(
    cursor: StreamCursor, job_id: str, patience: _Patience, for_resets: bool
) -> Steps[JobState]:
    """Emit the log's entries after the cursor. Returns the job's state from before the read.

    If that state is final, the log was complete when it was read. A state from before the end entry
    was written is read again, and so is the log.
    """
    while True:
        state = yield from read_state(job_id, deadline=patience.deadline)
        if state.status is Status.UNKNOWN:
            raise unknown(job_id)
        cursor.attempt = state.attempt
        ended = False
        size = PAGE
        while size == PAGE:
            page = yield from read_log(job_id, cursor.position, PAGE, patience.deadline)
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
                yield from _give(cursor.take(entry), job_id, patience, for_resets)
        if state.status.over or not ended:
            return state


def _follow_live(
    cursor: StreamCursor, job_id: str, mailbox: Any, patience: _Patience, for_resets: bool
) -> Steps[None]:
    """Emit entries as they are published, until the log must be read: after an acknowledged
    subscription, a gap, or a silence."""
    while events := (yield next_events(mailbox, patience.left(), SILENCE_SECONDS)):
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
            yield from _give(cursor.take(entry), job_id, patience, for_resets)


def _give(
    chunks: list[ChatChunk], job_id: str, patience: _Patience, for_resets: bool
) -> Emitting[ChatChunk]:
    """Emit the chunks of an entry, or of the completion."""
    for chunk in chunks:
        if chunk.reset and not for_resets:
            raise StreamRestarted(
                f"job {job_id} has started again, and its answer differs from the part that was "
                "read: discard that part, and read the answer from its start with another stream",
                job_id,
            )
        yield Emit(chunk)
    patience.renew()


def _entry(job_id: str, entry_id: bytes, data: bytes | None) -> Entry | None:
    """An entry of the log; None for one that no worker has written."""
    try:
        return Entry.from_wire(job_id, entry_id.decode(), from_json(data or b""))
    except UNREADABLE:
        return None


def _published(job_id: str, data: bytes) -> Entry | None:
    """The entry in a message; None for a message of another program."""
    try:
        published = from_json(data)
        return Entry.from_wire(job_id, published["id"], published["d"])
    except UNREADABLE:
        return None
