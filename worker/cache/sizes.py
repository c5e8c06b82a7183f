"""The sizes of a model's caches and what their kinds allow, as numbers."""

from __future__ import annotations

from collections.abc import Sequence

from worker.layers.cache import LayerCache, Size, by_slot, paged, sequence_size
from worker.layers.kv_cache import WindowKVCache

BOOKKEEPING = 512  # bytes of a page that no layer has
LEAST_TOKENS = 1024  # of one sequence, which a model's cache always has room for


class Rewinding:
    """The ability of layers to take tokens back."""

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        # True if tokens overwrite what earlier ones need; else nothing is taken back.
        self.protects = bool(by_slot(layers))
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
        self._token_bytes = sum(layer.token_bytes for layer in paged(layers))
        self.has_pages = bool(paged(layers))
        self._at_end = [layer.bytes_for for layer in by_slot(layers)]
        # The state of some layers depends on where the sequence ends.
        self.needs_snapshots = bool(self._at_end)
        self.needs_clearing = any(layer.needs_clearing for layer in layers)
        self.rewinding, self.draft_rewinding = Rewinding(layers), Rewinding(draft_layers)
        windows = [one.window for one in everything if isinstance(one, WindowKVCache)]
        self.smallest_window = min((one for one in windows if one is not None), default=None)

    def storage(self, size: Size) -> int:
        """Bytes of the storage."""
        pages = 0 if self.has_pages else size.pages * BOOKKEEPING
        return pages + self._ranks * sum(bytes_for(size) for bytes_for in self._all)

    def sequence(self, tokens: int) -> int:
        """Bytes of the storage of one sequence of so many tokens."""
        return self.storage(sequence_size(tokens))

    def least(self, context: int) -> int:
        """Bytes that are kept for the cache of a model with such a context."""
        return self.sequence(min(context, LEAST_TOKENS))

    def blocks(self, tokens: int) -> int:
        """Bytes of kept blocks of so many tokens."""
        return self._ranks * tokens * self._token_bytes

    def snapshot(self, end: int) -> int:
        """Bytes of a snapshot after `end` tokens."""
        return self._ranks * sum(bytes_for(Size(1, end, 0)) for bytes_for in self._at_end)
