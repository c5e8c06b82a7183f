"""Logits and log-probabilities of given tokens, computed in a KV slot of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from jobs.errors import JobError, invalid
from jobs.sizes import counted
from worker.cache.book import CacheBook
from worker.engine.plan import StepPlan
from worker.layers.batch import Span
from worker.layers.transfer import read_back, to_device
from worker.sampling.prompt_logprobs import CHUNK_TOKENS


class Scorer:
    """Plans steps of a prompt outside the batch, without sampling. `compute`: executes a plan and
    returns its logits; `not_finite(tokens)`: the error for logits that are not finite.

    Must not run while the engine steps.
    """

    def __init__(
        self,
        compute: Callable[[StepPlan], Tensor],
        book: CacheBook,
        context: int,
        not_finite: Callable[[int], JobError],
    ) -> None:
        self._compute, self._book = compute, book
        self._context, self.not_finite = context, not_finite

    def score(self, prompt: list[int], target: list[int]) -> list[float]:
        """Log-probability of each target token after the prompt and the targets before it."""
        if not target:
            return []
        scores: list[float] = []
        for start, logits in self._logits([*prompt, *target[:-1]], first=len(prompt) - 1):
            wanted = target[start - len(prompt) + 1 :][: len(logits)]
            chosen = to_device(wanted, logits.device)[:, None]
            scores += read_back(logits.log_softmax(-1).gather(1, chosen)[:, 0])
        return scores

    def prompt_logits(self, prompt: list[int]) -> Tensor:
        """Logits after each token of the prompt: float32 [len, vocab], on the CPU."""
        return torch.cat([logits.cpu() for _, logits in self._logits(prompt, first=0)])

    @torch.inference_mode()
    def _logits(self, ids: SequenceOf[int], first: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (position, float32 logits [rows, vocab]) of the positions from `first` on."""
        if len(ids) > self._context:
            raise JobError(
                "context_length_exceeded",
                f"{len(ids)} tokens exceed the context of {self._context} tokens",
                "prompt",
            )
        slot = self._book.acquire()
        assert slot is not None  # the pool has one slot more than the batch
        poisoned = False
        try:
            if not self._book.reserve(slot, len(ids)):
                raise JobError(
                    "out_of_memory",
                    f"the KV cache has no room for {counted(len(ids), 'token')} now",
                )
            self._book.begin(slot)
            for start in range(0, len(ids), CHUNK_TOKENS):
                chunk = ids[start : start + CHUNK_TOKENS]
                wanted = start + len(chunk) > first
                span = Span(slot, start, chunk, len(ids), len(chunk) if wanted else 1)
                plan = StepPlan(self._book.take_changes(), (span,))
                logits = self._compute(plan).to(torch.float32, copy=True)
                if not read_back(logits.isfinite().all()):
                    poisoned = True
                    raise self.not_finite(start + len(chunk))
                if wanted:
                    skip = max(0, first - start)
                    yield start + skip, logits[skip:]
        finally:
            self._book.release(slot, poisoned=poisoned)


def token_ids(values: SequenceOf[int], vocab: int, name: str) -> list[int]:
    """Returns `values` as a list of ints. Raises JobError unless all are ids of the vocabulary."""
    try:
        ids = [value.__index__() for value in values if not isinstance(value, bool)]
        valid = len(ids) == len(values)
    except (TypeError, AttributeError):
        valid = False
    if not valid:
        raise invalid(f"{name} must be token ids: a list of integers", name)
    for one in ids:
        if not 0 <= one < vocab:
            raise invalid(f"the vocabulary has {vocab} tokens, got id {one} in {name}", name)
    return ids
