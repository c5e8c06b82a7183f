"""State of one sequence: its tokens, how many are in the KV cache, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from jobs.api.answer import FinishReason
from jobs.errors import JobError, failure_of
from worker.cache.state_saver import StateSaver
from worker.sampling.form_errors import form_error, no_token_left
from worker.sampling.inputs import SamplingInput
from worker.sampling.params import SamplingParams
from worker.sampling.prompt_logits import CHUNK_TOKENS, PromptReader
from worker.sampling.sampler import Sampled
from worker.speculative.acceptance import Acceptance
from worker.text.detokenizer import Detokenizer
from worker.text.stop_strings import StopStrings


class TokenEvent(NamedTuple):
    """The addition of one token to a sequence. The last event has a finish_reason or an error."""

    sampled: Sampled | None  # None: no token, as when a waiting sequence is cancelled
    text: str = ""
    finish_reason: FinishReason | None = None
    error: JobError | None = None

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


Listener = Callable[[TokenEvent], None]


class Sequence:
    """Prompt and output tokens of one choice. The first `computed` tokens are in the KV cache.

    Without `params` nothing is drawn: it ends when its prompt is computed. `reader` takes what is
    wanted of the prompt's logits. A sequence with a `saver` runs alone, and its state is kept for a
    file. Without a detokenizer its events have no text.

    Owned by the thread that steps the engine; `cancel` may be called from any thread.
    """

    def __init__(
        self,
        prompt_ids: SequenceOf[int],
        params: SamplingParams | None = None,
        choice: int = 0,
        detokenizer: Detokenizer | None = None,
        listener: Listener | None = None,
        reader: PromptReader | None = None,
        saver: StateSaver | None = None,
        *,
        salt: str = "",
        bulk: bool = False,
        session: str | None = None,
    ) -> None:
        self.arrived_at = time.monotonic()
        self.bulk = bulk  # it leaves its slot to interactive sequences
        self.prompt_ids = prompt_ids  # perhaps of several sequences: must not change
        self.output_ids: list[int] = []
        self.reader, self.saver = reader, saver
        self.sampling = None if params is None else SamplingInput(params, choice, self.prompt_ids)
        self.session = session  # its state may go to files
        self.salt = salt  # state is shared with sequences of the same salt only
        self.cached_tokens: int | None = None  # of the prompt; None: not admitted yet
        self.computed = 0
        self.draft_computed = 0  # tokens in the draft's caches
        self.acceptance = Acceptance()
        self.slot: int | None = None
        self.started_at: float | None = None  # seconds since the epoch
        self.peak_bytes = 0  # of memory in use, of the steps that have computed its tokens
        self.cancelled = False
        self.ended = False
        self.unsure = False  # a token was appended, and the listener may not know it
        self._detokenizer = detokenizer
        self._stops: StopStrings | None = None
        if params is not None and params.stop_strings:
            self._stops = StopStrings(params.stop_strings, include=params.include_stop)
        self._listener = listener

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def pending(self) -> int:
        """Number of tokens not in the KV cache yet. All are computed before the next is sampled."""
        return self.length - self.computed

    @property
    def reusable(self) -> int:
        """Number of leading tokens that need not be computed if their state is known: all but the
        last, and none whose logits are still wanted."""
        reader, most = self.reader, self.length - 1
        if reader is None or not reader.wants(0, self.length):
            return most
        return min(most, reader.row)

    def next_count(self, budget: int) -> int:
        """Number of pending tokens that a step with room for `budget` tokens computes."""
        count, reader = min(self.pending, budget), self.reader
        if reader is None or not reader.wants(self.computed, count):
            return count
        return min(count, reader.row - self.computed + CHUNK_TOKENS)

    def reads(self, count: int) -> int:
        """Number of the next `count` tokens, the last ones, whose logits are read."""
        reader, start = self.reader, self.computed
        if reader is None or not reader.wants(start, count):
            return 0
        return start + count - reader.row

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions [start, end)."""
        split = len(self.prompt_ids)
        if start >= split:
            return self.output_ids[start - split : end - split]
        return [*self.prompt_ids[start:end], *self.output_ids[: max(0, end - split)]]

    @property
    def no_token_left(self) -> JobError | None:
        """The error if the form of the answer and other options leave no token to draw; None if
        they do, or if the answer has no form."""
        if self.sampling is None or self.sampling.matcher is None:
            return None
        params, matcher = self.sampling.params, self.sampling.matcher
        return no_token_left(params, matcher, len(self.output_ids))

    def cancel(self) -> None:
        """Request cancellation; the next step fails the sequence. Thread-safe."""
        self.cancelled = True

    def restart(self) -> None:
        """Lose the state in the KV cache, and what an interrupted step has left in the sampling
        input."""
        self.slot = None
        self.computed = self.draft_computed = 0
        if self.sampling is not None:
            params, choice = self.sampling.params, self.sampling.choice
            self.sampling = SamplingInput(params, choice, self.prompt_ids, self.output_ids)
        if self.saver is not None:
            self.saver.restart()

    def accept(self, sampled: Sampled) -> None:
        """Append the sampled token, notify the listener, and end on a stop condition."""
        self.unsure = True
        self._accept(sampled)
        self.unsure = False

    def complete(self) -> None:
        """End a sequence that draws nothing."""
        self.unsure = True
        self._end(TokenEvent(None, finish_reason="stop"))
        self.unsure = False

    def _accept(self, sampled: Sampled) -> None:
        sampling, token_id, output_ids = self.sampling, sampled.token_id, self.output_ids
        assert sampling is not None
        params = sampling.params
        output_ids.append(token_id)
        sampling.advance((token_id,))
        matcher = sampling.matcher
        if matcher is not None and matcher.error is not None:
            self.fail(form_error(params, matcher.error, len(output_ids)))
            return
        at_stop_token = token_id in params.stop_ids
        if at_stop_token and not params.include_stop:
            self._finish(sampled, "", "stop")
            return
        text, stopped = "", False
        if self._detokenizer is not None:
            text = self._detokenizer.push(token_id)
        if self._stops is not None and len(output_ids) >= params.min_tokens:
            text, stopped = self._stops.push(text)
        if stopped:
            self._end(TokenEvent(sampled, text, "stop"))
        elif at_stop_token or (matcher is not None and matcher.whole):
            self._finish(sampled, text, "stop")
        elif len(output_ids) >= params.max_tokens:
            self._finish(sampled, text, "length")
        elif self._listener is not None:
            self._listener(TokenEvent(sampled, text))

    def fail(self, error: JobError) -> None:
        """End with an error, without a further token."""
        if self.ended:
            return
        try:
            text = self._flush()[0]
        except BaseException as fault:  # the detokenizer may be what failed
            failure_of(fault)
            text = ""
        self._end(TokenEvent(None, text, error=error))

    def _finish(self, sampled: Sampled, text: str, reason: FinishReason) -> None:
        rest, stopped = self._flush()
        self._end(TokenEvent(sampled, text + rest, "stop" if stopped else reason))

    def _end(self, event: TokenEvent) -> None:
        if self._listener is not None:
            self._listener(event)
        self.ended = True  # last: another thread may wait for it, then read the events

    def _flush(self) -> tuple[str, bool]:
        """Returns the text that was held back, and whether a stop string ended it."""
        tail = self._detokenizer.finish() if self._detokenizer is not None else ""
        if self._stops is None:
            return tail, False
        text, stopped = self._stops.push(tail)
        return (text, True) if stopped else (text + self._stops.flush(), False)
