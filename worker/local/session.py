"""Conversations in the same process: `from worker import ChatSession`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jobs.api.answer import ChatCompletion
from jobs.api.chunk import ChatChunk
from jobs.api.conversation import (
    Turn,
    TurnInput,
    checked_system,
    ended_turn,
    messages_of,
    new_messages,
    split_turns,
)
from jobs.api.params import MessageInput
from jobs.api.request import ChatRequest
from jobs.api.session_fields import check_turn_fields
from jobs.errors import JobError, invalid
from jobs.saved import read_conversation, write_conversation
from jobs.stream.chunks import ChunkBuilder
from worker.chat.generation import ChatGeneration
from worker.local.collect import CollectingSink
from worker.local.engine import Engine
from worker.prompt.builder import in_session


@dataclass(frozen=True)
class _Turn:
    """A turn that was begun: its new messages and its answer."""

    messages: list[dict[str, Any]]
    chat: ChatGeneration
    sink: CollectingSink


class ChatSession:
    """A conversation with an engine, kept in memory.

    `fields` are those of all its requests, such as `temperature` or `tools`; a turn may have its
    own. One turn runs at a time: another one raises JobError (session_busy). A turn that fails
    leaves the conversation as it was. All methods raise JobError.
    """

    def __init__(self, engine: Engine, *, system: str | None = None, **fields: Any) -> None:
        self._engine, self._system, self._fields = engine, system or "", fields
        self._turns: list[Turn] = []
        self._turn: _Turn | None = None  # that was begun and is not among `_turns` yet
        self._running = threading.Lock()
        self._request("?", fields)  # raises InvalidRequest for a field that is invalid

    @property
    def history(self) -> list[dict[str, Any]]:
        """All messages, the system message first, as dicts in OpenAI's form."""
        return messages_of(self._system, self.turns)

    @property
    def system(self) -> str:
        """The system message; empty if there is none."""
        return self._system

    @property
    def turns(self) -> list[Turn]:
        """The turns: their messages, answer and finish_reason."""
        with suppress(JobError), self._idle():  # adds an answer that was stopped
            pass
        return list(self._turns)

    def respond(self, content: TurnInput, **fields: Any) -> ChatCompletion:
        """Run the next turn: a text of the user, or messages, such as results of tools. If the
        caller is interrupted, the answer is kept as far as it got."""
        sink = CollectingSink()
        for _ in self._run(content, fields, sink):
            pass
        return sink.completion()

    def stream(self, content: TurnInput, **fields: Any) -> Iterator[ChatChunk]:
        """Run the next turn and yield its chunks; the first step begins it. If the iterator is
        closed or dropped before its end, the answer is stopped, and kept as far as it got, with the
        finish_reason `cancelled`."""
        self._request(content, fields)  # raises now, not at the first step
        return self._run(content, fields, CollectingSink())

    def stop(self) -> bool:
        """Stop the answer that is generated: the call that generates it raises JobError
        (cancelled), and the answer is kept as far as it got, with the finish_reason `cancelled`.
        Any thread or signal handler may call this. Returns False if no answer is generated."""
        turn = self._turn
        if turn is None or turn.chat.done:
            return False
        turn.chat.cancel()
        return True

    def undo(self) -> Turn:
        """Remove the last turn, and return it. Raises JobError while one runs."""
        with self._idle():
            if not self._turns:
                raise invalid("the session has no turn to undo")
            return self._turns.pop()

    def reset(
        self, history: Iterable[MessageInput | Turn] = (), *, system: str | None = None
    ) -> None:
        """Begin again: with no turns, or with those of `history`, whose system message replaces the
        session's, as `system` does. Raises JobError while a turn runs."""
        its_system, turns = split_turns(history)
        text = self._system if system is None else checked_system(system)
        with self._idle():
            self._turns, self._system = turns, its_system or text

    def save(self, path: str | Path) -> None:
        """Write the conversation to a file, as JSON."""
        write_conversation(path, self._engine.info.name, self._system, self.turns)

    @classmethod
    def restore(cls, engine: Engine, path: str | Path, **fields: Any) -> Self:
        """The conversation of a file, continued by any engine: a history is text."""
        if "system" in fields:
            raise invalid("system: the file has it; reset(system=...) changes it", "system")
        saved = read_conversation(path)
        session = cls(engine, system=saved.system, **fields)
        session._turns = saved.turns
        return session

    def _request(
        self, content: TurnInput, fields: dict[str, Any]
    ) -> tuple[ChatRequest, list[dict[str, Any]]]:
        """The request of a turn, with all messages, and its new messages."""
        fields = {**self._fields, **fields}
        check_turn_fields(fields)
        request = ChatRequest(
            **fields,
            model=self._engine.info.name,
            messages=[*messages_of(self._system, self._turns), *new_messages(content)],
        )
        if request.continue_final_message:
            raise invalid(
                "continue_final_message is not possible in a session: remove it",
                "continue_final_message",
            )
        known = len(messages_of(self._system, self._turns))
        new: list[dict[str, Any]] = request.to_dict()["messages"][known:]
        return request, new

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """No turn runs meanwhile, and the last one has ended. Raises JobError if one runs."""
        if not self._running.acquire(blocking=False):
            raise JobError("session_busy", "this session generates an answer: wait for its end")
        try:
            if self._turn is not None:
                self._end(self._turn)
            yield
        finally:
            self._running.release()

    def _run(
        self, content: TurnInput, fields: dict[str, Any], sink: CollectingSink
    ) -> Iterator[ChatChunk]:
        with self._idle():
            request, messages = self._request(content, fields)
            turn = self._turn = _Turn(messages, self._submit(request, sink), sink)
            chunks = ChunkBuilder(request.job.id, request.model, int(time.time()))
            try:
                while not sink.over:
                    self._engine.step()
                    yield from (chunks.chunk([delta]) for delta in sink.take())
            finally:
                # No step here: the garbage collector may close an iterator within one. The next
                # call ends the turn.
                turn.chat.cancel()
            self._end(turn)
            completion = sink.completion()
            if request.stream_options is not None and request.stream_options.include_usage:
                yield chunks.usage(completion)

    def _submit(self, request: ChatRequest, sink: CollectingSink) -> ChatGeneration:
        try:
            return self._engine.submit(request, sink)
        except JobError as error:
            raise (error if request.truncate == "oldest" else in_session(error)) from None

    def _end(self, turn: _Turn) -> None:
        """Keep a turn, once it has ended, as far as it got."""
        while not turn.chat.done:
            self._engine.step()
        outcome = turn.sink.outcome
        assert outcome is not None
        answer, cancelled = outcome.result, False
        if answer is None and outcome.error is not None and outcome.error.code == "cancelled":
            answer, cancelled = outcome.partial, True
        ended = None
        if isinstance(answer, ChatCompletion):
            ended = ended_turn(turn.messages, answer, cancelled=cancelled)
        self._turns, self._turn = [*self._turns, *([ended] if ended else [])], None
