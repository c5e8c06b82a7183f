"""`--local` of `chatjobs chat` and `chatjobs bench`: a model in this process, without Redis and
without a worker.

The commands find `load` through the entry-point group `chatjobs.local`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.api.conversation import Turn
from jobs.cli.benchmark.load import probe
from jobs.cli.dialogue import Dialogue, Stopped
from jobs.cli.interrupts import interrupts_call
from jobs.cli.output import echo
from jobs.cli.printing import CUT, print_calls, print_stream
from worker.cli.options import need_torch, refusal

if TYPE_CHECKING:
    from jobs import ChatChunk, ChatCompletion, ChatRequest
    from jobs.api.answer import Usage
    from jobs.cli.benchmark.figures import Timeline
    from jobs.cli.benchmark.load import Load
    from worker import ChatSession, Engine


def load(
    reference: str,
    chat_template: Path | None,
    add_bos: bool | None,
    keep_quantised: bool,
    *,
    quiet: bool,
) -> LocalModel:
    """Load a model. Raises a click exception with one sentence if it can't run here."""
    need_torch()
    from jobs import JobError
    from worker import Engine

    if not quiet:
        echo(f"loading {reference} …", err=True, dim=True)
    started = time.monotonic()
    try:
        engine = Engine.load(
            reference, chat_template=chat_template, add_bos=add_bos, keep_quantised=keep_quantised
        )
    except JobError as error:
        raise refusal(error) from None
    if not quiet:
        echo(f"{engine.info.name}: {time.monotonic() - started:.1f} s", err=True, dim=True)
    return LocalModel(engine)


class LocalModel:
    """A loaded model, which answers on the thread of its caller."""

    def __init__(self, engine: Engine) -> None:
        self.name = engine.info.name
        self._engine = engine

    def answer(
        self, request: ChatRequest
    ) -> tuple[Iterator[ChatChunk], Callable[[], ChatCompletion]]:
        """The chunks of an answer, and its completion after their end. Both raise JobError."""
        from worker.local.collect import CollectingSink, streamed

        sink = CollectingSink()
        started = self._engine.submit(request, sink)

        def stop() -> bool:
            started.cancel()
            return True

        chunks = streamed(request, started, sink, self._engine.step)
        return _interruptible(chunks, stop), sink.completion

    def count_tokens(self, request: ChatRequest) -> int:
        """The tokens of a prompt, after an answer of one token. Raises JobError."""
        usage = self._engine.chat(probe(request)).usage
        return 0 if usage is None else usage.prompt_tokens

    def serve(self, load: Load, ended: Callable[[], None]) -> list[Timeline]:
        """Serve a load of requests together. `ended` is called for each one."""
        from worker.cli.local_load import serve

        return serve(self._engine, load, ended)

    def dialogue(self, system: str | None, fields: dict[str, Any]) -> Dialogue:
        """A conversation in memory. Raises JobError for fields that are invalid."""
        from worker import ChatSession

        return LocalDialogue(self.name, ChatSession(self._engine, system=system, **fields))


class LocalDialogue:
    """A conversation in memory with a model in this process."""

    def __init__(self, model: str, session: ChatSession) -> None:
        self.model = model
        self._session = session

    def ask(self, question: str) -> Usage | None:
        usage: Usage | None = None

        def chunks() -> Iterator[ChatChunk]:
            nonlocal usage
            options = {"include_usage": True}
            answer = self._session.stream(question, stream_options=options)
            for chunk in _interruptible(answer, self._session.stop):
                usage = chunk.usage or usage
                yield chunk

        try:
            print_stream(chunks())
        except KeyboardInterrupt:
            raise Stopped from None
        turn = self._session.turns[-1]
        print_calls(turn.answer.get("tool_calls") or ())
        if turn.finish_reason == "length":
            echo(CUT, err=True)
        return usage

    def stop(self) -> None:
        """The next call of the session ends a turn that was stopped."""

    def read(self) -> tuple[str, Sequence[Turn]]:
        return self._session.system, self._session.turns

    def reset(self, turns: Sequence[Turn], *, system: str | None = None) -> None:
        self._session.reset(turns, system=system)

    def undo(self) -> Turn:
        return self._session.undo()

    def close(self) -> None:
        """The process ends with the conversation."""


def _interruptible(chunks: Iterator[ChatChunk], stop: Callable[[], bool]) -> Iterator[ChatChunk]:
    """The chunks of an answer. Ctrl-C calls `stop`, and KeyboardInterrupt is raised after the step
    that runs: it would leave a step, or the answer, half done."""
    from jobs import JobError

    with interrupts_call(stop) as stopped:
        try:
            yield from chunks
        except JobError:
            if not stopped():
                raise
        if stopped():
            raise KeyboardInterrupt
