"""The state of one answer in its grammar: it follows the tokens of the output."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher


class Matcher:
    """Belongs to the thread that steps the engine. After an error nothing is legal any more.

    `ends`: the end tokens that the grammar knows. `stops`: further tokens that end the completion;
    they are legal where the grammar may end.
    """

    def __init__(self, start: LLMatcher, ends: frozenset[int], stops: frozenset[int]) -> None:
        self.inner = start.deep_copy()
        self.stops = stops
        self._last = ends | stops
        self._after = 0  # tokens from the stop on, which the grammar does not count

    def advance(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the answer."""
        for token_id in token_ids:
            stops = token_id in self.stops and self.inner.is_accepting()
            if self._after or stops or self.inner.is_stopped():
                self._after += 1
            else:
                self.inner.consume_token(token_id)

    def rollback(self, count: int) -> None:
        """Take the last tokens back."""
        after = min(count, self._after)
        self._after -= after
        if count > after:
            self.inner.rollback(count - after)

    @property
    def whole(self) -> bool:
        """True if the answer can't go on: no token but an end token is legal."""
        return self.inner.is_stopped() and not self.inner.is_error()

    @property
    def error(self) -> str | None:
        """The reason for which the grammar can't be followed any further; None if there is none."""
        if not self.inner.is_error():
            return None
        return (self.inner.get_error().splitlines() or ["unknown"])[0]

    def legal(self, draft: Sequence[int]) -> int:
        """Number of the tokens of a draft up to the first one that is not legal, or that ends the
        completion."""
        for number, token_id in enumerate(draft):
            if token_id in self._last:
                draft = draft[:number]
                break
        return int(self.inner.validate_tokens(list(draft))) if draft else 0

    @property
    def stuck(self) -> bool:
        """True if no token is legal."""
        return not any(self.inner.compute_bitmask())
