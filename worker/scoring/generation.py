"""Runs scoring requests: a sequence for each continuation and each window, whose logits are read.

The sequences draw nothing and run in the batch of all others. Continuations of one prompt share its
state through the prefix cache; those of one token are read from one sequence, the prompt.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jobs import clock
from jobs.api.answer import Usage
from jobs.api.score_request import (
    Choice,
    Item,
    LogLikelihood,
    Perplexity,
    ScoreRequest,
    parse_item,
)
from jobs.api.score_result import ContinuationScore, ScoredItem, ScoreResult, TextScore, best
from jobs.errors import JobError, failure_of
from worker.backend import MachineError, Outcome, Progress, Sink, TooLong
from worker.checkpoint.tokenizer import Tokenizer
from worker.engine import sequence as engine_sequence
from worker.engine.engine import EngineCore
from worker.engine.token_ids import TokenSlice
from worker.scoring.encoding import ItemEncoder, Targets
from worker.scoring.reading import ContinuationReader, NextTokenReader

logger = logging.getLogger(__name__)

Reader = ContinuationReader | NextTokenReader

DIGITS = 7  # of the log-probability of a token, whose column has float32


@dataclass(frozen=True, slots=True)
class _Scored:
    """Targets, and the sequence that scores them, perhaps with others. `part`: their positions
    among those that the reader has."""

    targets: Targets
    sequence: engine_sequence.Sequence
    reader: Reader
    part: slice

    @property
    def logprobs(self) -> Sequence[float]:
        return self.reader.scores.logprobs[self.part]

    @property
    def is_greedy(self) -> bool:
        return all(self.reader.scores.greedy[self.part])

    @property
    def cached_tokens(self) -> int:
        return self.sequence.cached_tokens or 0


class _ItemRun:
    """One item while it is scored. `error`: why it can't be. `failed`: one of its sequences has,
    and the others are cancelled; of the engine's thread."""

    def __init__(self, given: Any, encoder: ItemEncoder) -> None:
        """Raises MachineError if a process that encodes long texts can't be started."""
        self.custom_id = given.get("custom_id") if isinstance(given, dict) else None
        self.item: Item | None = None
        self.error: JobError | None = None
        self.targets: Sequence[Targets] = ()
        self.scored: list[_Scored] = []
        self.failed = False
        try:
            self.item = parse_item(given)
            self.targets = encoder.targets(self.item)
        except MachineError:
            raise
        except JobError as error:
            self.error = error

    def start(self, request: ScoreRequest, on_end: Callable[..., None]) -> None:
        """Make the sequences. `on_end` gets this item, the reader of a sequence, and its last
        event."""
        scored: dict[int, _Scored] = {}
        alone = isinstance(self.item, Perplexity)  # windows have prompts of their own
        groups = ([at] for at in range(len(self.targets))) if alone else _together(self.targets)
        for places in groups:
            first, *others = (self.targets[place] for place in places)
            reader: Reader = ContinuationReader(first)
            if others:
                ids = [one.token_ids[-1] for one in (first, *others)]
                reader = NextTokenReader(first.first, ids)
            sequence = engine_sequence.Sequence(
                TokenSlice(first.token_ids, 0, len(first.token_ids) - 1),
                listener=partial(on_end, self, reader),
                reader=reader,
                salt=request.cache_salt or "",
                bulk=request.job.priority == "bulk",
            )
            for number, place in enumerate(places):
                part = slice(number, number + 1) if others else slice(None)
                scored[place] = _Scored(self.targets[place], sequence, reader, part)
        self.scored = [scored[place] for place in range(len(self.targets))]


def _together(targets: Sequence[Targets]) -> Iterator[list[int]]:
    """The places of the targets that one sequence scores: those of one token behind the same
    prompt, and each other one alone."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, one in enumerate(targets):
        if one.first == len(one.token_ids) - 1:
            alike.setdefault(tuple(one.token_ids[:-1]), []).append(place)
        else:
            yield [place]
    yield from alike.values()


class Scoring:
    """One request: its handle, and its assembly, which the thread that receives the answer uses.

    The engine's thread puts the end of each sequence into a queue; after the last one, it calls
    `announce`.
    """

    def __init__(
        self,
        request: ScoreRequest,
        runs: Sequence[_ItemRun],
        tokenizer: Tokenizer,
        announce: Callable[[Scoring], None],
        *,
        fingerprint: str,
    ) -> None:
        self._request, self._runs, self._tokenizer = request, runs, tokenizer
        self._announce, self._fingerprint = announce, fingerprint
        self._created = int(time.time())
        for run in runs:
            run.start(request, self._on_end)
        scored = [one for run in runs for one in run.scored]
        self._open = {one.reader for one in scored}  # changed by the engine's thread
        self.sequences = [*dict.fromkeys(one.sequence for one in scored)]
        self._ends: deque[tuple[_ItemRun, JobError | None]] = deque()
        self._finished_at: float | None = None
        self._taken = False

    @property
    def done(self) -> bool:
        """True if all sequences have ended."""
        return not self._open

    def cancel(self) -> None:
        """Request cancellation of all sequences. Thread-safe."""
        for sequence in self.sequences:
            sequence.cancel()

    def _on_end(self, run: _ItemRun, reader: Reader, event: engine_sequence.TokenEvent) -> None:
        """A sequence has ended: it draws nothing, so it has no other event. Called again if a step
        was interrupted here."""
        self._ends.append((run, event.error))
        if event.error is not None and not run.failed:
            for other in run.scored:
                other.sequence.cancel()
            run.failed = True
        self._open.discard(reader)
        if self.done:
            self._finished_at = clock.now()
            self._announce(self)

    def take(self) -> Progress:
        """Implements `Assembly`."""
        if self._taken or not self.done:
            return Progress()
        self._taken = True
        try:
            return Progress((), self._outcome())
        except BaseException as error:  # it fails this request only
            reason = failure_of(error)
            logger.exception("scores could not be assembled")
            fact = f"the scores could not be assembled: {reason.message}"
            return Progress((), Outcome(error=JobError("internal", fact)))

    def _outcome(self) -> Outcome:
        while self._ends:
            run, error = self._ends.popleft()
            run.error = run.error or error  # the first one is the cause
        result = self._result()
        error = self._job_error()
        started = [one.started_at for one in self.sequences if one.started_at is not None]
        return Outcome(
            result=result if error is None else None,
            error=error,
            partial=None if error is None else result,
            started_at=min(started, default=None),
            finished_at=self._finished_at,
        )

    def _job_error(self) -> JobError | None:
        """The error of the whole job: it was cancelled, or no item could be scored for a reason
        that may not be there the next time. Any other error is that of its item."""
        errors = [run.error for run in self._runs if run.error is not None]
        cancelled = next((error for error in errors if error.code == "cancelled"), None)
        if cancelled is not None:
            return cancelled
        if len(errors) == len(self._runs) and any(error.retryable for error in errors):
            return next(error for error in errors if error.retryable)
        return None

    def _result(self) -> ScoreResult:
        sequences = self.sequences
        tokens = sum(len(one.prompt_ids) for one in sequences)
        return ScoreResult(
            created=self._created,
            model=self._request.model,
            items=[self._scored_item(run) for run in self._runs],
            usage=Usage(
                prompt_tokens=tokens,
                completion_tokens=0,
                total_tokens=tokens,
                prompt_tokens_details=Usage.PromptDetails(
                    cached_tokens=sum(one.cached_tokens or 0 for one in sequences)
                ),
                peak_memory_mb=Usage.in_mb(max((one.peak_bytes for one in sequences), default=0)),
            ),
            system_fingerprint=self._fingerprint,
        )

    def _scored_item(self, run: _ItemRun) -> ScoredItem:
        item, error = run.item, run.error
        named = ScoredItem(
            type=None if item is None else item.type,
            custom_id=run.custom_id if isinstance(run.custom_id, str) else None,
            error=None if error is None else error.to_dict(),
        )
        if item is None or error is not None:
            return named
        if not isinstance(item, LogLikelihood | Choice):
            named.text = self._text_score(item.text, run.scored)
            return named
        given = item.continuations if isinstance(item, LogLikelihood) else item.choices
        named.continuations = [
            self._continuation_score(text, one, item.delimiter or "")
            for text, one in zip(given, run.scored, strict=True)
        ]
        if isinstance(item, Choice):
            named.picked = best(named.continuations, item.normalize)
        return named

    def _continuation_score(
        self, given: str | list[int], one: _Scored, delimiter: str
    ) -> ContinuationScore:
        logprobs, targets = one.logprobs, one.targets
        return ContinuationScore(
            logprob_sum=math.fsum(logprobs),
            is_greedy=one.is_greedy,
            tokens=len(logprobs),
            bytes=self._bytes(given, delimiter),
            token_ids=list(targets.token_ids[targets.first :]),
            token_logprobs=self._details(logprobs),
            prompt_tokens=targets.first,
            cached_tokens=one.cached_tokens,
            truncated_tokens=targets.truncated,
        )

    def _text_score(self, given: str | list[int], windows: Sequence[_Scored]) -> TextScore:
        logprobs = [logprob for one in windows for logprob in one.logprobs]
        text = given
        if not isinstance(text, str):
            text = self._tokenizer.decode(text, skip_special_tokens=False)
        return TextScore(
            logprob_sum=math.fsum(logprobs),
            tokens=len(logprobs),
            words=len(re.split(r"\s+", text)),  # as lm-evaluation-harness counts them
            bytes=self._bytes(given),
            windows=len(windows),
            token_logprobs=self._details(logprobs),
        )

    def _details(self, logprobs: Sequence[float]) -> list[float] | None:
        if not self._request.token_logprobs:
            return None
        return [round(logprob, DIGITS) for logprob in logprobs]

    def _bytes(self, given: str | list[int], delimiter: str = "") -> int:
        if isinstance(given, str):
            return len(given.removeprefix(delimiter).encode())
        return sum(len(self._tokenizer.token_bytes(one)) for one in given)


def _check_context(runs: Sequence[_ItemRun]) -> None:
    """Raise TooLong with the shortest context in which one more item could be scored, if any is too
    long for this worker."""
    errors = [run.error for run in runs if isinstance(run.error, TooLong)]
    if errors:
        least = min(errors, key=lambda error: error.tokens)
        raise TooLong(least.message, least.param, least.tokens, rest=True)


def start_scoring(
    engine: EngineCore, request: ScoreRequest, sink: Sink
) -> Generator[None, None, Scoring]:
    """Encode the items of a request, one between two `yield`s, then queue their sequences. A bad
    item fails alone. `sink` is told on the stepping thread when all have ended. Raises JobError if
    the request can't run, and TooLong if an item is too long for this worker and `sink` hands on.
    """
    engine.require_open()
    encoder = ItemEncoder(engine, request)
    runs: list[_ItemRun] = []
    for given in request.items:
        if runs:
            yield
        runs.append(_ItemRun(given, encoder))
    if sink.hands_on:
        _check_context(runs)
    scoring = Scoring(
        request, runs, engine.tokenizer, sink.pending, fingerprint=engine.info.fingerprint
    )
    if scoring.done:
        sink.pending(scoring)  # all items are bad
    else:
        engine.add(scoring.sequences)
    return scoring
