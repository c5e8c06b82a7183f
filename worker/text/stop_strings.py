"""Stop strings: matched across token boundaries and never returned, not even in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches the text of one sequence. The first stop string that is complete ends it.

    If several are complete at the same character, the longest one is removed, so the result doesn't
    depend on how the text is cut into tokens. Stop strings apply to the whole text, including
    reasoning.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""  # suffix of the text that may be the beginning of a stop string

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; returns the text that is safe to show, and whether a stop string follows it."""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """The text still held back at the end of the sequence."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
