"""The tokens that may come next in one answer: those that its grammar allows, or the one that its
budget of reasoning forces. It follows the tokens of the output."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from worker.constraints.thinking_budget import ThinkingCount


class Matcher:
    """Belongs to the thread that steps the engine. After an error nothing is legal any more.

    `start`: the grammar of the completion; None: any text. `ends`: the end tokens that the grammar
    knows. `stops`: further tokens that end the completion; they are legal where the grammar may
    end. `answer`: the grammar of what follows reasoning that `thinking` ends. The mark that ends it
    comes from the draw alone, never from a draft.
    """

    def __init__(
        self,
        start: LLMatcher | None,
        ends: frozenset[int],
        stops: frozenset[int],
        thinking: ThinkingCount | None = None,
        answer: LLMatcher | None = None,
    ) -> None:
        self.inner = None if start is None else start.deep_copy()
        self.stops = stops
        self._last = ends | stops
        self._thinking, self._answer = thinking, answer
        self._after = 0  # tokens from the stop on, which the grammar does not count

    def advance(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the answer."""
        for token_id in token_ids:
            if self._thinking is not None:
                forced = self._thinking.forced is not None
                self._thinking.advance(token_id)
                if forced:
                    self._begin_answer()
                    continue
            if self.inner is None:
                continue
            stops = token_id in self.stops and self.inner.is_accepting()
            if self._after or stops or self.inner.is_stopped():
                self._after += 1
            else:
                self.inner.consume_token(token_id)

    def _begin_answer(self) -> None:
        """The reasoning ends, perhaps within a character, where its grammar allows no end."""
        if self._answer is not None:
            self.inner = self._answer.deep_copy()

    def rollback(self, count: int) -> None:
        """Take the last tokens back, none of which was forced."""
        if self._thinking is not None:
            self._thinking.rollback(count)
        after = min(count, self._after)
        self._after -= after
        if self.inner is not None and count > after:
            self.inner.rollback(count - after)

    def is_free(self, count: int) -> bool:
        """True if each of the next `count` tokens may be any, whatever those before it are."""
        room = self.room
        return self.inner is None and (room is None or room >= count)

    @property
    def room(self) -> int | None:
        """Least number of tokens that come before one is forced; None if none is forced."""
        return None if self._thinking is None else self._thinking.room

    @property
    def forced(self) -> int | None:
        """The next token, if it is forced."""
        return None if self._thinking is None else self._thinking.forced

    def forced_after(self, draft: Sequence[int]) -> int | None:
        """The token after a legal draft, if it is forced."""
        if self._thinking is None or not draft:
            return self.forced
        for token_id in draft:
            self._thinking.advance(token_id)
        forced = self._thinking.forced
        self._thinking.rollback(len(draft))
        return forced

    @property
    def whole(self) -> bool:
        """True if the answer can't go on: no token but an end token is legal."""
        return self.inner is not None and self.inner.is_stopped() and not self.inner.is_error()

    @property
    def error(self) -> str | None:
        """The reason for which the grammar can't be followed any further; None if there is none."""
        if self.inner is None or not self.inner.is_error():
            return None
        return (self.inner.get_error().splitlines() or ["unknown"])[0]

    def legal(self, draft: Sequence[int]) -> int:
        """Number of the tokens of a draft up to the first one that is not legal, that may be
        forced, or that ends an answer with a grammar."""
        draft = draft[: self.room]
        if self.inner is None:
            return len(draft)
        draft = self._before_end(draft)
        return int(self.inner.validate_tokens(list(draft))) if draft else 0

    def forced_tokens(self, most: int) -> Sequence[int]:
        """The next tokens, up to `most`, if the grammar forces them: those of the only text that it
        allows next, as the tokenizer writes it, up to where a longer token could begin. The first
        one is the only legal token; so is each later one, unless the tokenizer writes the rest of
        the text in another way after the token before it."""
        inner = self.inner
        if most <= 0 or inner is None or self._after or inner.is_stopped():
            return ()
        return self._before_end(inner.compute_ff_tokens()[:most])

    def _before_end(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Tokens up to the first one that ends the completion."""
        for number, token_id in enumerate(token_ids):
            if token_id in self._last:
                return token_ids[:number]
        return token_ids

    def stops_after(self, draft: Sequence[int]) -> list[int]:
        """The numbers of tokens of a legal draft after which one of `stops` is legal."""
        inner, found = self.inner, []
        if inner is None or not self.stops:
            return []
        for number in range(1 + len(draft)):
            if number:
                inner.consume_token(draft[number - 1])
            if inner.is_accepting():
                found.append(number)
        if draft:
            inner.rollback(len(draft))
        return found

    @property
    def stuck(self) -> bool:
        """True if no token is legal."""
        return self.inner is not None and not any(self.inner.compute_bitmask())
