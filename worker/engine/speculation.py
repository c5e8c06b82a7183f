"""Which sequences of a step compute guessed tokens after their pending one, and how many.

The model computes guesses like known tokens and draws what follows each of them. A guess is
accepted if it is the token that was drawn before it, with the same random number as without a
draft: so the tokens are the same, and only their number per step differs.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from worker.engine.acceptance import WORTH, updated
from worker.engine.draft_costs import DraftCosts
from worker.engine.guess import Draft
from worker.engine.kv_pool import CachePool
from worker.engine.rollback import Undo
from worker.engine.scheduler import Scheduled
from worker.engine.sequence import Sequence
from worker.engine.step import Drawn, Part

LOOK = 8  # steps between two looks whether a paused sequence can go on
START_WEIGHT = 0.01  # of one token in the rate that new sequences begin with
LEAST_START = WORTH + 0.1  # each sequence tries


class Speculation:
    """Adds guesses to steps and counts how many were right. `most`: tokens of a guess.
    `step_tokens`: tokens of a step.

    `costs`: tells when guesses cost more time than they save; None: what a sequence guesses depends
    neither on time nor on other sequences.
    """

    def __init__(
        self,
        draft: Draft | None,
        pool: CachePool,
        *,
        most: int,
        step_tokens: int,
        costs: DraftCosts | None,
    ) -> None:
        self.steps = 0  # in which sequences had guesses, counted for each sequence
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.drafts = draft is not None
        self._draft, self._pool, self._costs = draft, pool, costs
        self._most, self._step_tokens = most, step_tokens
        self._start = draft.start if draft is not None else 0.0  # rate of new sequences
        self._engine_steps = 0
        self._measures: bool | None = None  # whether this step must have guesses

    def extend(self, scheduled: SequenceOf[Scheduled]) -> list[Part]:
        """The parts of a step, with guesses where they are worth it and there is room."""
        if self._draft is None:
            return [Part(sequence, count) for sequence, count in scheduled]
        left = self._step_tokens - sum(count for _, count in scheduled)
        drawing = sum(bool(one.output_ids) and count == one.pending for one, count in scheduled)
        self._measures = None
        self._engine_steps += 1
        if self._costs is not None:
            self._measures = self._costs.begin(drawing, whole=drawing == len(scheduled))
        wanted = []
        for sequence, count in scheduled:
            number = min(self._number(sequence, count), left)
            if number > 0 and self._fits(sequence, count + number):
                wanted.append((sequence, number))
                left -= number
        guesses = self._draft.propose(wanted) if wanted else {}
        parts = []
        for sequence, count in scheduled:
            guess, undo = guesses.get(sequence), None
            if guess is not None:
                assert sequence.slot is not None
                end = sequence.computed + count + len(guess.token_ids)
                undo = Undo(self._pool.layers, sequence.slot, sequence.computed, end)
            parts.append(Part(sequence, count, guess, undo))
        return parts

    def count(self, drawn: SequenceOf[Drawn]) -> None:
        """Count the guesses of a step, before its tokens end sequences that report the figures."""
        for one in drawn:
            guessed, accepted = len(one.part.guessed), one.accepted
            if guessed:
                self.steps += 1
                self.drafted_tokens += guessed
                self.accepted_tokens += accepted
                one.part.sequence.acceptance.add(guessed, accepted)
                if self._costs is not None:
                    rate = updated(self._start, guessed, accepted, START_WEIGHT)
                    self._start = max(rate, LEAST_START)

    def settle(self, drawn: Drawn, taken: int) -> None:
        """Bring the caches to a sequence that `taken` of the drawn tokens were appended to."""
        part = drawn.part
        sequence, guess, undo = part.sequence, part.guess, part.undo
        end = sequence.computed + part.count
        if guess is None or undo is None:
            sequence.computed = end
            return
        sequence.computed = undo.back_to(end + max(0, taken - 1))
        guess.settle(sequence, drawn.accepted)

    def end(self, drawn: SequenceOf[Drawn]) -> None:
        """Note what a step cost."""
        if self._costs is not None:
            self._costs.end(sum(len(one.part.guessed) for one in drawn))

    def close(self) -> None:
        """Free the draft."""
        self._draft = None

    def _number(self, sequence: Sequence, count: int) -> int:
        """Number of tokens to guess after `count` pending ones."""
        if not sequence.output_ids or count != sequence.pending or count > self._most + 1:
            return 0  # it computes its prompt, perhaps again
        last = sequence.plan.max_tokens - len(sequence.output_ids) - 1
        acceptance = sequence.acceptance
        if acceptance.paused and self._measures is None and self._engine_steps % LOOK:
            return 0
        number = min(acceptance.length(self._most, self._start), last)
        if number <= 0 or self._costs is None or self._measures:
            return number
        if self._measures is False:
            return 0
        expected = acceptance.expected(number)
        acceptance.paused = not self._costs.worth(expected, number, paused=acceptance.paused)
        return 0 if acceptance.paused else number

    def _fits(self, sequence: Sequence, count: int) -> bool:
        assert sequence.slot is not None
        return self._pool.reserve(sequence.slot, sequence.computed + count)
