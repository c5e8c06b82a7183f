"""Executes plans: the forward pass of a step, and the draw of its tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from worker.cache.changes import CacheChange, Resize, SaveBlocks, SaveSnapshot
from worker.cache.copies import Copy
from worker.cache.pool import CachePool
from worker.cache.prefix_store import StateRef
from worker.device import is_out_of_memory
from worker.engine.plan import StepPlan
from worker.layers.batch import Batch
from worker.layers.transfer import read_back, take
from worker.models.model import Model
from worker.sampling.inputs import SamplingBatch, SamplingInput
from worker.sampling.prompt_logits import read_rows
from worker.sampling.sampler import Sampled, StepResult, sample
from worker.speculative.draft_plan import DraftPlan, Proposed
from worker.speculative.draft_runner import DraftRunner

logger = logging.getLogger(__name__)

Sample = Callable[[Tensor, SamplingBatch], list[Sampled]]


class StorageError(Exception):
    """The device has no memory for storage of this size; its cause is the error of the device."""

    def __init__(self, resize: Resize) -> None:
        super().__init__(resize)
        self.resize = resize


class ModelRunner:
    """Owns a model, its draft model, their caches and the device; it decides nothing. Belongs to
    the thread that steps the engine. `draw`: draws the tokens, `sample` but in tests. `on_unsaved`:
    called when there was no memory for a state that should be kept, after all other changes."""

    def __init__(
        self,
        model: Model,
        pool: CachePool,
        device: torch.device,
        draft: Model | None = None,
        *,
        draw: Sample = sample,
        on_unsaved: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.pool, self.device = model, pool, device
        self.draft = None if draft is None else DraftRunner(draft, pool, device, model.vocab_size)
        self._draw, self._on_unsaved = draw, on_unsaved

    def apply(self, changes: Iterable[CacheChange]) -> None:
        """Change the caches. Raises StorageError if there is no memory for their storage."""
        unsaved: BaseException | None = None
        for change in changes:
            try:
                self.pool.execute(change)
            except (RuntimeError, MemoryError) as error:
                if isinstance(change, Resize) and is_out_of_memory(error):
                    raise StorageError(change) from error
                if not isinstance(change, SaveBlocks | SaveSnapshot):
                    raise
                unsaved = error
        if unsaved is not None:
            logger.warning("the state of a sequence can't be kept: %s", unsaved)
            self._on_unsaved()

    def forward(self, plan: StepPlan) -> Tensor:
        """Execute a plan up to its logits [rows that are wanted, vocab], which the next plan may
        overwrite."""
        self.apply(plan.changes)
        return self.model(Batch.lay_out(plan.spans, self.device), self.pool.layers)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> StepResult:
        """Draw tokens after a forward pass, and read the logits of prompts."""
        prompts = read_rows(logits, batch.prompts) if batch.prompts else ()
        checks = read_back(take(logits, batch.checked).isfinite().all(1)) if batch.checked else ()
        if not batch.rows:
            return StepResult((), prompts, checks)
        if len(batch.rows) < len(logits):
            logits = take(logits, batch.at)
        return StepResult(self._draw(logits, batch), prompts, checks)

    def propose(self, plan: DraftPlan, sampling: Sequence[SamplingInput]) -> list[Proposed]:
        """Execute a plan of the draft model. Returns a draft for each of its spans."""
        assert self.draft is not None
        self.apply(plan.changes)
        return self.draft.propose(plan, sampling)

    def put(self, state: StateRef, copy: Copy) -> None:
        """Keep a state that does not come from a slot."""
        self.pool.kept[state.number] = copy

    def copy_of(self, state: StateRef) -> Copy | None:
        """The tensors of a kept state; None if it was not saved, or not yet."""
        return self.pool.kept.get(state.number)

    def close(self) -> None:
        """Free the models and the caches."""
        self.pool.close()
        del self.model
        self.draft = None
