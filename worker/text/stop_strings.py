"""Stop strings: found across token boundaries, never shown, not even in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches the text of one sequence; the stop string that is complete first ends it.

    Of those that are complete with the same character, the longest counts. So the result doesn't
    depend on how the text is cut into tokens. Stop strings apply to the whole text, reasoning
    included.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""  # the end of the text, as far as a stop string could begin in it

    def push(self, text: str) -> tuple[str, bool]:
        """Text that can be shown, and whether a stop string was found right after it."""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
