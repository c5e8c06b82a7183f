"""Chooses the sequences that compute guessed tokens in a step, and the number of tokens.

The model computes guesses like known tokens and draws what follows each of them. A guess is
accepted if it is the token that was drawn before it, with the same random number as without a
draft: so the tokens are the same, and only their number per step differs.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from worker.engine.acceptance import WORTH, updated
from worker.engine.cache_book import CacheBook
from worker.engine.cache_pool import CachePool
from worker.engine.draft_costs import DraftCosts
from worker.engine.guess import Draft
from worker.engine.rollback import Undo
from worker.engine.scheduler import Scheduled
from worker.engine.sequence import Sequence
from worker.engine.step import Drawn, Part

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
        book: CacheBook,
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
        self._draft, self._book, self._pool, self._costs = draft, book, pool, costs
        self._most, self._step_tokens = most, step_tokens
        self._window = book.sizes.smallest_window or 2 * most + 1
        self._start = draft.start if draft is not None else 0.0  # rate of new sequences
        self._guessed, self._accepted = 0, 0  # tokens of this step

    def extend(self, scheduled: SequenceOf[Scheduled]) -> list[Part]:
        """The parts of a step, with guesses where they are worth it and there is room."""
        self._guessed = self._accepted = 0
        if self._draft is None or self._rests(scheduled):
            return [Part(sequence, count) for sequence, count in scheduled]
        left = self._step_tokens - sum(count for _, count in scheduled)
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
        if self._costs is not None:
            self._costs.looked()
        return parts

    def count(self, drawn: SequenceOf[Drawn]) -> None:
        """Count the guesses of a step, before its tokens end sequences that report the figures."""
        for one in drawn:
            if one.part.guess is None:
                continue
            guessed, accepted = len(one.part.guessed), one.accepted
            self.steps += 1
            self.drafted_tokens += guessed
            self.accepted_tokens += accepted
            self._guessed += guessed
            self._accepted += accepted
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

    def end(self) -> None:
        """Note what a step cost."""
        if self._costs is not None:
            self._costs.end(self._guessed, self._accepted)

    def close(self) -> None:
        """Free the draft."""
        self._draft = None

    def _rests(self, scheduled: SequenceOf[Scheduled]) -> bool:
        """True if a step has no guesses because they would make it slower."""
        if self._costs is None:
            return False
        if self._costs.rests(len(scheduled)):
            return True
        drawing = sum(bool(one.output_ids) and count == one.pending for one, count in scheduled)
        return not self._costs.begin(drawing, whole=drawing == len(scheduled))

    def _number(self, sequence: Sequence, count: int) -> int:
        """Number of tokens to guess after `count` pending ones."""
        if not sequence.output_ids or count != sequence.pending or count > self._most + 1:
            return 0  # it computes its prompt, perhaps again
        last = sequence.plan.max_tokens - len(sequence.output_ids) - 1
        last = min(last, self._window - count)  # a window can take back as many as it has columns
        number = sequence.acceptance.length(self._most, self._start)
        if number and self._costs is not None and self._costs.tries:
            number = self._most  # what short guesses cost tells little about long ones
        return min(number, last)

    def _fits(self, sequence: Sequence, count: int) -> bool:
        assert sequence.slot is not None
        return self._book.reserve(sequence.slot, sequence.computed + count)
