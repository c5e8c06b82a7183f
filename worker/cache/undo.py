"""Takes back tokens that a forward pass computed on a draft."""

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

    def restore(self, kept: int) -> None:
        """Take back the tokens [kept, end); see `Rewinding.kept`."""
        if kept < self._end:
            for layer, saved in self._saved:
                layer.restore(self._slot, saved, self._start, kept, self._end)
