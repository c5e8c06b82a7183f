"""Logits and log-probabilities of tokens that are given, in a cache slot of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from jobs.errors import JobError, invalid
from worker.engine.kv_pool import CachePool
from worker.layers.batch import Batch, Span
from worker.models.model import Model

ROWS = 256  # rows of logits that are held at once


class Scorer:
    """Runs prompts beside the batch; `not_finite` explains logits that are no numbers.

    Its caller holds the engine's lock while it runs.
    """

    def __init__(
        self,
        model: Model,
        pool: CachePool,
        device: torch.device,
        context: int,
        not_finite: Callable[[int], JobError],
    ) -> None:
        self._model, self._pool, self._device = model, pool, device
        self._context, self._not_finite = context, not_finite

    def score(self, prompt: list[int], target: list[int]) -> list[float]:
        """Log-probability of each target token after the prompt and the targets before it."""
        if not target:
            return []
        scores: list[float] = []
        for start, logits in self._logits([*prompt, *target[:-1]], first=len(prompt) - 1):
            wanted = target[start - len(prompt) + 1 :][: len(logits)]
            chosen = torch.tensor(wanted, device=logits.device)[:, None]
            scores += logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
        return scores

    def prompt_logits(self, prompt: list[int]) -> Tensor:
        """Logits after each token of the prompt: float32 [len, vocab], on the CPU."""
        return torch.cat([logits.cpu() for _, logits in self._logits(prompt, first=0)])

    @torch.inference_mode()
    def _logits(self, ids: SequenceOf[int], first: int) -> Iterator[tuple[int, Tensor]]:
        """Logits of positions from `first` on, as (position, float32 [rows, vocab]) in order."""
        if len(ids) > self._context:
            raise JobError(
                "context_length_exceeded",
                f"{len(ids)} tokens are more than the context of {self._context}",
                "prompt",
            )
        slot = self._pool.acquire()
        assert slot is not None  # the pool has one more than the batch takes
        spoiled = False
        try:
            if not self._pool.reserve(slot, len(ids)):
                raise JobError(
                    "out_of_memory", f"{len(ids)} tokens do not fit into the KV cache now"
                )
            self._pool.start(slot)
            for start in range(0, len(ids), ROWS):
                chunk = ids[start : start + ROWS]
                wanted = start + len(chunk) > first
                span = Span(slot, start, chunk, len(ids), all_logits=wanted)
                batch, _ = Batch.prepare([span], self._device)
                logits = self._model(batch, self._pool.layers)
                if not logits.isfinite().all():
                    spoiled = True
                    raise self._not_finite(start + len(chunk))
                if wanted:
                    skip = max(0, first - start)
                    yield start + skip, logits[skip:]
        finally:
            self._pool.release(slot, spoiled=spoiled)


def token_ids(values: SequenceOf[int], vocab: int, name: str) -> list[int]:
    """Ids as plain numbers. Raises JobError if one of them is none of the vocabulary's."""
    try:
        ids = [value.__index__() for value in values if not isinstance(value, bool)]
        whole = len(ids) == len(values)
    except (TypeError, AttributeError):
        whole = False
    if not whole:
        raise invalid(f"{name} must be token ids, whole numbers in a list", name)
    for one in ids:
        if not 0 <= one < vocab:
            raise invalid(f"the vocabulary has {vocab} tokens, got id {one} in {name}", name)
    return ids
