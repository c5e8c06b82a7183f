"""Stop strings: matched across token boundaries, and left out of the text or its last part."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches the text of one sequence. The first stop string that is complete ends it.

    If several are complete at the same character, the longest one is removed, so the result doesn't
    depend on how the text is cut into tokens. Stop strings apply to the whole text, including
    reasoning. `include`: return the stop string as the end of the text, instead of removing it.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._held = ""  # suffix of the text that may be the beginning of a stop string

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; returns the text that is safe to show, and whether a stop string ends it."""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            end, start = min(found)
            return text[: end if self._include else start], True
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """The text still held back at the end of the sequence."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    start = text.find(stop[:1], max(0, len(text) - len(stop) + 1)) if stop else -1
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
