"""Sessions for asyncio: `Session` with `await` and `async for`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Unpack

from jobs.api.answer import ChatCompletion
from jobs.api.chunk import ChatChunk
from jobs.api.conversation import Turn, TurnInput, messages_of, split_turns
from jobs.api.params import MessageInput, SessionTurnFields
from jobs.client.cancelling_waits import answer_of_async, cancelling_async, follow_or_cancel
from jobs.client.follow import OnRestart, check_stream
from jobs.client.job import AsyncJob
from jobs.client.wait import check_timeout
from jobs.store.connection.protocol import Connection, iterate_async, run_async
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


class AsyncSession:
    """A conversation with an id, see `Session`."""

    def __init__(
        self,
        submit: Callable[..., Awaitable[AsyncJob]],
        connection: Connection,
        state: SessionState,
    ) -> None:
        self.id, self.model = state.id, state.model
        self._submit, self._connection, self._state = submit, connection, state

    async def submit(
        self,
        content: TurnInput,
        *,
        wait: bool = False,
        edit: bool = False,
        durable: bool = False,
        **fields: Unpack[SessionTurnFields],
    ) -> AsyncJob:
        """Enqueue the next turn, see `Session.submit`."""
        request = turn_request(self._state, content, wait=wait, edit=edit, fields=dict(fields))
        return await self._submit(request, durable=durable)

    async def send(
        self,
        content: TurnInput,
        *,
        wait: bool = False,
        edit: bool = False,
        timeout: float | None = None,
        **fields: Unpack[SessionTurnFields],
    ) -> ChatCompletion:
        """Run the next turn, see `Session.send`."""
        check_timeout(timeout)
        job = await self.submit(content, wait=wait, edit=edit, **fields)
        return await answer_of_async(job.id, self._connection, timeout)

    async def stream(
        self,
        content: TurnInput,
        *,
        wait: bool = False,
        edit: bool = False,
        timeout: float | None = None,
        on_restart: OnRestart = "raise",
        **fields: Unpack[SessionTurnFields],
    ) -> AsyncIterator[ChatChunk]:
        """Run the next turn and yield its chunks, see `Session.stream`. The first step
        submits it."""
        check_stream(timeout, on_restart)
        fields.setdefault("stream", True)
        job = await self.submit(content, wait=wait, edit=edit, **fields)
        steps = follow_or_cancel(job.id, timeout, on_restart)
        async with cancelling_async(job.id, self._connection):
            async for chunk in iterate_async(steps, self._connection):
                yield chunk

    async def edit(
        self,
        content: TurnInput,
        *,
        wait: bool = False,
        timeout: float | None = None,
        **fields: Unpack[SessionTurnFields],
    ) -> ChatCompletion:
        """Replace the last turn, see `Session.edit`."""
        return await self.send(content, wait=wait, edit=True, timeout=timeout, **fields)

    async def undo(self) -> Turn:
        """Remove the last turn, and return it."""
        return await run_async(undo_turn(self.id), self._connection)

    async def turns(self) -> list[Turn]:
        """The turns: their messages, answer and finish_reason."""
        _, turns = await run_async(read_turns(self.id), self._connection)
        return turns

    async def history(self) -> list[dict[str, Any]]:
        """All messages, see `Session.history`."""
        return messages_of(*await run_async(read_turns(self.id), self._connection))

    async def fork(self, id: str | None = None, *, model: str | None = None) -> AsyncSession:
        """A new session with the same history, see `Session.fork`."""
        steps = fork_session(self._state, id, model)
        return AsyncSession(
            self._submit, self._connection, await run_async(steps, self._connection)
        )

    async def reset(
        self, history: Iterable[MessageInput | Turn] = (), *, system: str | None = None
    ) -> None:
        """Begin again, see `Session.reset`."""
        its_system, turns = split_turns(history)
        await run_async(replace_turns(self.id, its_system or system, turns), self._connection)

    async def delete(self) -> None:
        """Delete the history, see `Session.delete`."""
        await run_async(delete_session(self.id), self._connection)

    async def ttl(self) -> int:
        """Seconds until the session expires, unless it is used before."""
        return await run_async(read_ttl(self.id), self._connection)

    def __repr__(self) -> str:
        return f"AsyncSession({self.id!r}, model={self.model!r})"
