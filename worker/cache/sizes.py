"""The sizes of a model's caches and what their kinds allow, as numbers."""

from __future__ import annotations

from collections.abc import Sequence

from worker.layers.cache import LayerCache
from worker.layers.kv_cache import WindowKVCache

LEAST_TOKENS = 1024  # of one sequence, which a model's cache always has room for


class Rewinding:
    """The ability of layers to take tokens back."""

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        # True if tokens overwrite what earlier ones need; else nothing is taken back.
        self.protects = not all(layer.by_position for layer in layers)
        self._partly = all(layer.rewinds for layer in layers)

    def kept(self, start: int, wanted: int, end: int) -> int:
        """Number of tokens that a slot can hold after the tokens [wanted, end) were taken back, of
        those that were computed from `start` on: `wanted`, or `start` if the state of a layer can't
        stop between."""
        return wanted if wanted == end or self._partly else start


class CacheSizes:
    """Of the caches of a model, and of those of its draft if it has one. `ranks`: that have such
    caches, of which the bytes are counted."""

    def __init__(
        self,
        layers: Sequence[LayerCache],
        draft_layers: Sequence[LayerCache] = (),
        *,
        ranks: int = 1,
    ) -> None:
        self._ranks = ranks
        everything = [*layers, *draft_layers]
        self._all = [layer.bytes_for for layer in everything]
        self._by_position = [layer.bytes_for for layer in layers if layer.by_position]
        self._at_end = [layer.bytes_for for layer in layers if not layer.by_position]
        # The state of some layers depends on where the sequence ends.
        self.needs_snapshots = bool(self._at_end)
        self.needs_clearing = any(layer.needs_clearing for layer in layers)
        self.rewinding, self.draft_rewinding = Rewinding(layers), Rewinding(draft_layers)
        windows = [one.window for one in everything if isinstance(one, WindowKVCache)]
        self.smallest_window = min((one for one in windows if one is not None), default=None)

    def storage(self, slots: int, columns: int) -> int:
        """Bytes of the storage of so many slots of so many tokens."""
        return self._ranks * sum(bytes_for(slots, columns) for bytes_for in self._all)

    def least(self, context: int) -> int:
        """Bytes that are kept for the cache of a model with such a context."""
        return self.storage(1, min(context, LEAST_TOKENS))

    def blocks(self, tokens: int) -> int:
        """Bytes of kept blocks of so many tokens."""
        return self._ranks * sum(bytes_for(1, tokens) for bytes_for in self._by_position)

    def snapshot(self, end: int) -> int:
        """Bytes of a snapshot after `end` tokens."""
        return self._ranks * sum(bytes_for(1, end) for bytes_for in self._at_end)
