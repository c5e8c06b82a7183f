"""Takes back tokens that a forward pass computed on a guess."""

from __future__ import annotations

from collections.abc import Sequence

from worker.layers.cache import LayerCache


class Undo:
    """A copy of the values that the tokens [start, end) overwrite in one slot; made before they are
    computed."""

    def __init__(self, layers: Sequence[LayerCache], slot: int, start: int, end: int) -> None:
        self._slot, self._start, self._end = slot, start, end
        self._saved = [
            (layer, layer.save(slot, start, end)) for layer in layers if not layer.by_position
        ]
        self._rewinds = all(layer.rewinds for layer, _ in self._saved)

    def back_to(self, kept: int) -> int:
        """Take back the tokens [kept, end). Returns how many tokens the slot holds now: `kept`, or
        `start` if the state of a layer can't stop between, and the rest is computed again."""
        if kept < self._end:
            kept = kept if self._rewinds else self._start
            for layer, saved in self._saved:
                layer.restore(self._slot, saved, self._start, kept, self._end)
        return kept
