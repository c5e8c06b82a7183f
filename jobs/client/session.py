"""`client.session(...)`: a conversation with an id, whose history Redis keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Unpack

from jobs.api.answer import ChatCompletion
from jobs.api.chunk import ChatChunk
from jobs.api.conversation import Turn, TurnInput, messages_of, split_turns
from jobs.api.params import MessageInput, SessionTurnFields
from jobs.client.cancelling_waits import (
    answer_of,
    cancelling,
    cancelling_from_submit,
    follow_or_cancel,
)
from jobs.client.follow import OnRestart, check_stream
from jobs.client.job import Job
from jobs.client.wait import check_timeout
from jobs.store.connection.protocol import Connection, iterate_sync, run_sync
from jobs.store.sessions import (
    SessionState,
    delete_session,
    fork_session,
    read_ttl,
    read_turns,
    replace_turns,
    turn_request,
    undo_turn,
)


class Session:
    """A conversation. Each request carries only the new messages: the worker reads the others from
    Redis, and appends the answer when the job ends. Any process may continue it by its id.

    All methods raise JobError: `session_busy` (SessionBusy, with `job_id`) while a turn runs,
    `not_found` if the session has expired or was deleted. The fields of a request, such as
    `temperature` or `tools`, may be given when it is opened, or for one turn.
    """

    def __init__(
        self, submit: Callable[..., Job], connection: Connection, state: SessionState
    ) -> None:
        self.id, self.model = state.id, state.model
        self._submit, self._connection, self._state = submit, connection, state

    def submit(
        self,
        content: TurnInput,
        *,
        wait: bool = False,
        edit: bool = False,
        durable: bool = False,
        **fields: Unpack[SessionTurnFields],
    ) -> Job:
        """Enqueue the next turn: a text of the user, or messages, such as results of tools.

        `wait`: run after the turns that have not ended, instead of raising `session_busy`. `edit`:
        replace the last turn. `truncate="oldest"`: leave out the oldest turns if the context has no
        room for all; they stay in the history. `durable`: see `Client.submit`.
        """
        request = turn_request(self._state, content, wait=wait, edit=edit, fields=dict(fields))
        return self._submit(request, durable=durable)

    def send(
        self,
        content: TurnInput,
        *,
        wait: bool = False,
        edit: bool = False,
        timeout: float | None = None,
        **fields: Unpack[SessionTurnFields],
    ) -> ChatCompletion:
        """Run the next turn, see `submit`. If the wait is given up, the answer is stopped, and kept
        as far as it got."""
        check_timeout(timeout)
        turn = turn_request(self._state, content, wait=wait, edit=edit, fields=dict(fields))
        with cancelling_from_submit(turn, self._connection) as request:
            return answer_of(self._submit(request).id, self._connection, timeout)

    def stream(
        self,
        content: TurnInput,
        *,
        wait: bool = False,
        edit: bool = False,
        timeout: float | None = None,
        on_restart: OnRestart = "raise",
        **fields: Unpack[SessionTurnFields],
    ) -> Iterator[ChatChunk]:
        """Run the next turn and yield its chunks, see `submit` and `Job.stream`. The first step
        submits it. If the iterator is closed before its end, or ends with WaitTimeout or
        StreamRestarted, the answer is stopped, and kept as far as it got."""
        check_stream(timeout, on_restart)
        fields.setdefault("stream", True)
        turn = turn_request(self._state, content, wait=wait, edit=edit, fields=dict(fields))
        with cancelling_from_submit(turn, self._connection) as request:
            job = self._submit(request)
            steps = follow_or_cancel(job.id, timeout, on_restart)
            with cancelling(job.id, self._connection):
                yield from iterate_sync(steps, self._connection)

    def edit(
        self,
        content: TurnInput,
        *,
        wait: bool = False,
        timeout: float | None = None,
        **fields: Unpack[SessionTurnFields],
    ) -> ChatCompletion:
        """Replace the last turn: other messages, and their answer."""
        return self.send(content, wait=wait, edit=True, timeout=timeout, **fields)

    def undo(self) -> Turn:
        """Remove the last turn, and return it."""
        return run_sync(undo_turn(self.id), self._connection)

    def turns(self) -> list[Turn]:
        """The turns: their messages, answer and finish_reason."""
        return run_sync(read_turns(self.id), self._connection)[1]

    def history(self) -> list[dict[str, Any]]:
        """All messages, the system message first, as dicts in OpenAI's form."""
        return messages_of(*run_sync(read_turns(self.id), self._connection))

    def fork(self, id: str | None = None, *, model: str | None = None) -> Session:
        """A new session with the same history, fields and time to live, by default of the same
        model. Raises InvalidRequest if the id is taken."""
        steps = fork_session(self._state, id, model)
        return Session(self._submit, self._connection, run_sync(steps, self._connection))

    def reset(
        self, history: Iterable[MessageInput | Turn] = (), *, system: str | None = None
    ) -> None:
        """Begin again: with no turns, or with those of `history`, whose system message replaces the
        session's, as `system` does."""
        its_system, turns = split_turns(history)
        steps = replace_turns(self.id, its_system or system, turns)
        run_sync(steps, self._connection)

    def delete(self) -> None:
        """Delete the history. A deleted session can't be continued."""
        run_sync(delete_session(self.id), self._connection)

    def ttl(self) -> int:
        """Seconds until the session expires, unless it is used before."""
        return run_sync(read_ttl(self.id), self._connection)

    def __repr__(self) -> str:
        return f"Session({self.id!r}, model={self.model!r})"
