"""Restores scheduler and cache state after a failed or interrupted step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from jobs.errors import JobError, failure_of
from worker import device as devices
from worker.cache.book import no_memory
from worker.engine.sequence import Sequence

logger = logging.getLogger(__name__)


class Changes:
    """Surrounds all that changes slots or kept state. If it is interrupted anywhere, or fails other
    than by a JobError, what they hold is unknown: `reset` comes before the next change."""

    def __init__(self, reset: Callable[[], None]) -> None:
        self._reset = reset
        self._unfinished = False

    def settle(self) -> None:
        """Reset if a change did not end."""
        if self._unfinished:
            self._reset()
            self._unfinished = False

    @contextmanager
    def begin(self) -> Iterator[None]:
        self.settle()
        self._unfinished = True
        try:
            yield
        except JobError:  # whoever raises it has tidied up
            self._unfinished = False
            raise
        self._unfinished = False


def fail_unsure(sequences: Iterable[Sequence], failure: JobError | None) -> None:
    """Fail the sequences whose last token may not have reached their listener. `failure`: of the
    step; None after an interrupt."""
    for sequence in [*sequences]:
        if sequence.unsure:
            fact = "the process was interrupted while a token was handed over"
            if failure is not None:
                fact = f"the engine failed: {failure.message}"
            sequence.fail(JobError("internal", fact))


def reason_of(error: BaseException, tokens: int) -> JobError:
    """The error of a sequence with so many tokens that was alone in a failed step."""
    if devices.is_out_of_memory(error):
        return no_memory(tokens, first_line(error))
    logger.error("a sequence failed in the engine", exc_info=error)
    return JobError("internal", f"the engine failed: {failure_of(error).message}")


def first_line(error: BaseException) -> str:
    """The first line of an error; torch's have a dozen where memory is lacking."""
    return (str(error).splitlines() or [type(error).__name__])[0]
