"""CUDA graphs of decode steps: the kernels of a step are started together, by one call.

Most of the time of a step on a GPU passes in Python, which starts several hundred kernels one by
one. A graph is made for some numbers of rows; a step with fewer rows fills the rest with rows that
belong to no sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from worker.kernels import gpu
from worker.layers.batch import Batch
from worker.layers.cache import LayerCache
from worker.layers.kv_cache import FullKVCache, WindowKVCache
from worker.layers.recurrent_cache import RecurrentCache
from worker.layers.replay import Inputs

logger = logging.getLogger(__name__)

READ = (FullKVCache, WindowKVCache, RecurrentCache)  # caches that the kernels of a graph read
MOST_ROWS = 512
# Rows of graphs. Rows that fill up take little time, and to make a graph as long as a dozen steps.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, MOST_ROWS + 1, 32))

OFTEN = (
    16  # steps of a size until it has a graph of its own, if there is one of up to twice its size
)

Compute = Callable[[Inputs], Tensor]


class Graph:
    """A step of `rows` rows: its inputs, its kernels, and its result [rows, …]."""

    def __init__(self, compute: Compute, inputs: Inputs, rows: int, pool: Any) -> None:
        self._batch = Batch.of_no_sequence(rows, inputs.batch.token_ids.device)
        self._x = None if inputs.x is None else inputs.x.new_zeros(rows, inputs.x.shape[1])
        given = replace(inputs, batch=self._batch, x=self._x)
        # Compiles kernels, and allocates what libraries keep. No row belongs to a sequence yet:
        # recurrent states must advance once, by the first call.
        compute(given)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            self._graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                self._out = compute(given)
            except BaseException:
                with suppress(RuntimeError):
                    self._graph.capture_end()
                raise
            self._graph.capture_end()

    def __call__(self, inputs: Inputs) -> Tensor:
        """The result for the rows of `inputs`. The next call of any graph overwrites it."""
        self._fill(inputs)
        self._graph.replay()
        return self._out[: len(inputs.batch.token_ids)]

    def _fill(self, inputs: Inputs) -> None:
        self._batch.take(inputs.batch)
        if self._x is not None and inputs.x is not None:
            self._x[: len(inputs.x)] = inputs.x


class Graphs:
    """Computes decode steps by graphs, from the second step of a size on. Belongs to one model,
    whose caches and tables of positions have one place at a time."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._graphs: dict[int, Graph] = {}
        self._seen: dict[int, int] = {}  # steps of a size that has no graph
        self._place: object = None  # of what the graphs read
        self._pool: Any = None  # of the memory of all graphs
        self.enabled = enabled

    def serve(self, inputs: Inputs, caches: Sequence[LayerCache]) -> bool:
        """True if a step may be a graph: it decodes, and kernels without any wait compute it."""
        batch = inputs.batch
        return (
            self.enabled
            and batch.token_ids.is_cuda
            and gpu.usable()
            and batch.decode is not None
            and not batch.chunks
            and batch.logits_rows is None
            and not inputs.rotations
            and len(batch.token_ids) <= MOST_ROWS
            and all(isinstance(cache, READ) for cache in caches)
        )

    def __call__(self, compute: Compute, inputs: Inputs, caches: Sequence[LayerCache]) -> Tensor:
        """The result of `compute` [rows, …], for each row by itself."""
        group = inputs.batch.decode
        assert group is not None
        stored = [cache.stored() for cache in caches if isinstance(cache, READ)]
        for one in stored:
            one.require(slots=group.high, positions=group.longest)
        place = [inputs.table_sizes, *[one.place for one in stored]]
        if place != self._place:
            self.clear()
            self._place = place
        rows = next(size for size in SIZES if size >= group.size)
        graph = self._graphs.get(rows)
        if graph is None:
            self._seen[rows] = seen = self._seen.get(rows, 0) + 1
            larger = min((size for size in self._graphs if size > rows), default=0)
            if seen < (OFTEN if rows <= larger <= 2 * rows else 2):
                return self._graphs[larger](inputs) if larger else compute(inputs)
            graph = self._made(compute, inputs, rows)
            if graph is None:
                return compute(inputs)
            self._graphs[rows] = graph
        return graph(inputs)

    def clear(self) -> None:
        """Forget all graphs."""
        self._graphs.clear()
        self._seen.clear()
        self._pool = None

    def _made(self, compute: Compute, inputs: Inputs, rows: int) -> Graph | None:
        """A graph; None if there can be none."""
        with torch.cuda.device(inputs.batch.token_ids.device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            try:
                return Graph(compute, inputs, rows, self._pool)
            except torch.OutOfMemoryError:
                self.clear()
                return None
            except RuntimeError as error:
                logger.warning(
                    "decode steps start their kernels one by one, because they can't be a CUDA "
                    "graph (%s)",
                    (str(error).splitlines() or [""])[0],
                )
                self.clear()
                self.enabled = False
                return None
