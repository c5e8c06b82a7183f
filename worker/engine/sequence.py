"""One completion in the making: its tokens, how far the cache has caught up, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from jobs.api.answer import FinishReason
from jobs.errors import JobError
from worker.engine.sampler import Draw, Sampled
from worker.engine.sampling_plan import SamplingPlan
from worker.text.detokenizer import Detokenizer
from worker.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one token added to a sequence. The last step has a finish_reason or an error."""

    sampled: Sampled | None  # None: no token, as when a sequence ends before its first one
    text: str = ""
    finish_reason: FinishReason | None = None
    error: JobError | None = None

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


Listener = Callable[[TokenEvent], None]


class Sequence:
    """Prompt and output tokens of one choice. `computed` tokens of it are in the cache.

    Owned by the engine's thread; `cancelled` may be set from any.
    """

    def __init__(
        self,
        prompt_ids: SequenceOf[int],
        plan: SamplingPlan,
        choice: int,
        detokenizer: Detokenizer,
        listener: Listener,
    ) -> None:
        self.prompt_ids = list(prompt_ids)
        self.output_ids: list[int] = []
        self.plan = plan
        self.draw = Draw(plan, choice, self.prompt_ids, self.output_ids)
        self.computed = 0
        self.slot: int | None = None
        self.started_at: float | None = None  # seconds since the epoch
        self.cancelled = False
        self.ended = False
        self._detokenizer = detokenizer
        self._stops = StopStrings(list(plan.stop_strings))
        self._listener = listener

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def pending(self) -> int:
        """Tokens that the cache has not caught up with. The next token needs all of them."""
        return self.length - self.computed

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions [start, end)."""
        split = len(self.prompt_ids)
        if start >= split:
            return self.output_ids[start - split : end - split]
        return self.prompt_ids[start:end] + self.output_ids[: max(0, end - split)]

    def cancel(self) -> None:
        """Ask for an end; the next step fails the sequence. From any thread, at any time."""
        self.cancelled = True

    def accept(self, sampled: Sampled) -> None:
        """Take the next token; tells the listener and ends the sequence where it has to."""
        plan = self.plan
        self.output_ids.append(sampled.token_id)
        reached = len(self.output_ids) >= plan.min_tokens
        if sampled.token_id in plan.stop_ids:
            self._end(sampled, "", "stop")
            return
        text, stopped = self._detokenizer.push(sampled.token_id), False
        if plan.stop_strings and reached:
            text, stopped = self._stops.push(text)
        if stopped:
            self.ended = True
            self._listener(TokenEvent(sampled, text, "stop"))
        elif len(self.output_ids) >= plan.max_tokens:
            self._end(sampled, text, "length")
        else:
            self._listener(TokenEvent(sampled, text))

    def fail(self, error: JobError) -> None:
        """End without a further token."""
        if not self.ended:
            self.ended = True
            self._listener(TokenEvent(None, self._rest()[0], error=error))

    def _end(self, sampled: Sampled, text: str, reason: FinishReason) -> None:
        rest, stopped = self._rest()
        self.ended = True
        self._listener(TokenEvent(sampled, text + rest, "stop" if stopped else reason))

    def _rest(self) -> tuple[str, bool]:
        """Text that was held back, and whether a stop string ends it."""
        tail = self._detokenizer.finish()
        if not self.plan.stop_strings:
            return tail, False
        text, stopped = self._stops.push(tail)
        return (text, True) if stopped else (text + self._stops.flush(), False)
