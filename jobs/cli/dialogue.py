"""The turns of an interactive `chatjobs chat`: over the queue, or with a model in this process.

`Conversation` reads the lines of the terminal and calls a `Dialogue`, which owns the turns.
`QueuedDialogue` keeps them in a session in Redis; the worker package has the one for `--local`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from jobs.cli.printing import print_job
from jobs.cli.waiting import WaitNotice

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jobs import ChatChunk, ChatCompletion, ChatRequest, Client, Job, Session
    from jobs.api.answer import Usage
    from jobs.api.conversation import Turn
    from jobs.cli.benchmark.figures import Timeline
    from jobs.cli.benchmark.load import Load

END_SECONDS = 10.0  # the longest wait for the end of a stopped answer
CANCELS, CANCEL_SECONDS = 5, 0.1  # tries, and the pause between two


class Stopped(Exception):
    """Ctrl-C stopped the answer, which is kept as far as it got."""


class Dialogue(Protocol):
    """Turns with one model. All methods raise JobError."""

    model: str

    def ask(self, question: str) -> Usage | None:
        """Run one turn and print its answer. Raises Stopped after Ctrl-C."""

    def stop(self) -> None:
        """Make sure that the last answer has ended."""

    def read(self) -> tuple[str, Sequence[Turn]]:
        """The system message and the turns."""

    def reset(self, turns: Sequence[Turn], *, system: str | None = None) -> None:
        """Replace the turns, and the system message unless it is None."""

    def undo(self) -> Turn:
        """Remove the last turn, and return it."""

    def close(self) -> None:
        """Free what the conversation holds."""


class LocalModel(Protocol):
    """A model in this process, as the entry-point group `chatjobs.local` loads it."""

    name: str

    def count_tokens(self, request: ChatRequest) -> int:
        """The tokens of a prompt, after an answer of one token. Raises JobError."""

    def serve(self, load: Load, ended: Callable[[], None]) -> list[Timeline]:
        """Serve a load of requests together. `ended` is called for each one."""

    def answer(
        self, request: ChatRequest
    ) -> tuple[Iterator[ChatChunk], Callable[[], ChatCompletion]]:
        """The chunks of an answer, and its completion after their end. Both raise JobError."""

    def dialogue(self, system: str | None, fields: dict[str, Any]) -> Dialogue: ...


def load_local(
    reference: str,
    chat_template: Path | None = None,
    add_bos: bool | None = None,
    keep_quantised: bool = False,
    *,
    quiet: bool,
) -> LocalModel:
    """Load a model in this process, by the worker package."""
    from importlib.metadata import entry_points

    (plugin,) = entry_points(group="chatjobs.local", name="load")
    loaded: LocalModel = plugin.load()(
        reference, chat_template, add_bos, keep_quantised, quiet=quiet
    )
    return loaded


class QueuedDialogue:
    """A session in Redis, whose turns are jobs.

    `wait_for_worker` raises JobError if no worker takes the job.
    """

    def __init__(
        self, client: Client, session: Session, wait_for_worker: Callable[[Job], None]
    ) -> None:
        self.model = session.model
        self._client, self._session = client, session
        self._wait_for_worker = wait_for_worker
        self._open: Job | None = None  # of the last question, unless it is known to have ended

    def ask(self, question: str) -> Usage | None:
        from jobs import JobError

        # Known before it is submitted: Ctrl-C may come at any moment from here on.
        job = self._open = self._client.job(uuid4().hex)
        with WaitNotice(self._client.connection, quiet=False) as notice:
            try:
                self._session.submit(question, job={"id": job.id})
                notice.watch(job)
                self._wait_for_worker(job)
                completion = print_job(job, notice, as_json=False, quiet=False)
                self._open = None
            except KeyboardInterrupt:
                notice.watch(None)
                self.stop()
                raise Stopped from None
            except JobError:
                with suppress(JobError):
                    self._stop(tries=1)
                raise
        return completion.usage

    def stop(self) -> None:
        """Cancel the job of the last question, if it may run, and wait for its end. Raises JobError
        if Redis fails: the next call then cancels it, as after Ctrl-C."""
        self._stop(CANCELS)

    def read(self) -> tuple[str, Sequence[Turn]]:
        from jobs.store.connection.protocol import run_sync
        from jobs.store.sessions import read_turns

        return run_sync(read_turns(self._session.id), self._client.connection)

    def reset(self, turns: Sequence[Turn], *, system: str | None = None) -> None:
        self._session.reset(turns, system=system)

    def undo(self) -> Turn:
        return self._session.undo()

    def close(self) -> None:
        self._stop(CANCELS)
        self._session.delete()

    def _stop(self, tries: int) -> None:
        from jobs import JobError

        if self._open is None:
            return
        job = self._open
        _cancel(job, tries)
        self._open = None
        with suppress(JobError):  # its error says that it was cancelled
            job.result(END_SECONDS)


def _cancel(job: Job, tries: int) -> None:
    """Cancel a job that was submitted, or whose submit Redis may still receive."""
    from jobs import JobError

    for number in range(tries):
        if number:
            time.sleep(CANCEL_SECONDS)
        try:
            job.cancel()
            return
        except JobError as error:
            if error.code != "not_found":
                raise
