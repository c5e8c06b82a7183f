"""Executes plans: the forward pass of a step, and the draw of its tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from jobs.errors import invalid
from worker.cache.changes import CacheChange, Resize, SaveBlocks, SaveSnapshot
from worker.cache.copies import Copy
from worker.cache.pool import CachePool
from worker.cache.prefix_store import StateRef
from worker.device import is_out_of_memory
from worker.engine.plan import StepPlan
from worker.layers.batch import Batch, Following, Span
from worker.layers.shard import WHOLE, Shard
from worker.layers.transfer import read_back, take
from worker.models.model import Model
from worker.ranks.leader import Ranks
from worker.ranks.messages import Change, Changed, Compute, Follow
from worker.sampling.inputs import SamplingBatch, SamplingInput
from worker.sampling.prompt_logits import Found, read_rows
from worker.sampling.sampler import Drawn, StepResult, draw
from worker.speculative.draft_plan import DraftPlan, Proposed
from worker.speculative.draft_runner import DraftRunner

logger = logging.getLogger(__name__)

Draw = Callable[[Tensor, SamplingBatch], Drawn]


class StorageError(Exception):
    """The device has no memory for storage of this size; its cause is the error of the device."""

    def __init__(self, resize: Resize) -> None:
        super().__init__(resize)
        self.resize = resize


@dataclass(frozen=True, slots=True)
class UnreadResult:
    """The result of a step, which the device may still compute."""

    drawn: Drawn | None
    prompts: Sequence[Found | None] = ()
    checks: Sequence[bool] = ()

    @property
    def token_ids(self) -> Tensor | None:
        """The token of each row of the step, on the device; None if not all of them are there."""
        return None if self.drawn is None else self.drawn.token_ids

    def read(self) -> StepResult:
        """Waits for the step."""
        return StepResult(
            () if self.drawn is None else self.drawn.read(), self.prompts, self.checks
        )


class ModelRunner:
    """Owns a model, its draft model, their caches and the device; it decides nothing. Belongs to
    the thread that steps the engine. `draw`: draws the tokens, that of the sampler but in tests.
    `on_unsaved`: called when there was no memory for a state that should be kept, after all other
    changes. `ranks`: those that follow this one, in each change and in each forward pass; `shard`:
    the part of one that follows."""

    def __init__(
        self,
        model: Model,
        pool: CachePool,
        device: torch.device,
        draft: Model | None = None,
        *,
        draw: Draw = draw,
        on_unsaved: Callable[[], None] = lambda: None,
        ranks: Ranks | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self.model, self.pool, self.device = model, pool, device
        self.draft = None if draft is None else DraftRunner(draft, pool, device, model.vocab_size)
        self._draw, self._on_unsaved, self.ranks = draw, on_unsaved, ranks
        self._shard = shard if ranks is None else ranks.shard
        self._batch: Batch | None = None  # of the last forward pass

    def apply(self, changes: Iterable[CacheChange]) -> None:
        """Change the caches. Raises StorageError if there is no memory for their storage."""
        if self.ranks is None:
            unsaved = self.change(changes)
        else:
            unsaved = self._change_all(self.ranks, tuple(changes))
        if unsaved:
            self._on_unsaved()

    def change(self, changes: Iterable[CacheChange]) -> bool:
        """Change the caches of this rank. Returns True if there was no memory for a state that
        should be kept. Raises StorageError."""
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
        return unsaved is not None

    def _change_all(self, ranks: Ranks, changes: tuple[CacheChange, ...]) -> bool:
        """`change` on all ranks: what one of them lacks, all lack."""
        if not changes:
            return False
        unsaved, lacking = False, None
        with ranks.together():
            ranks.send(Change(changes))
            try:
                unsaved = self.change(changes)
            except StorageError as error:
                lacking = error
            for reply in ranks.replies():
                assert isinstance(reply, Changed)
                unsaved = unsaved or reply.unsaved
                if lacking is None and reply.lacking is not None:
                    lacking = StorageError(reply.lacking)
                    lacking.__cause__ = MemoryError(reply.fact)
        if lacking is not None:
            raise lacking
        return unsaved

    def forward(self, plan: StepPlan) -> Tensor:
        """Execute a plan up to its logits [rows that are wanted, vocab], which the next plan may
        overwrite."""
        self.apply(plan.changes)
        if self.ranks is None:
            return self.compute(plan.spans)
        with self.ranks.together():
            self.ranks.send(Compute(plan.spans))
            return self.compute(plan.spans)

    def compute(self, spans: Sequence[Span]) -> Tensor:
        """The forward pass of this rank. Returns what `forward` does, on the first rank."""
        self._batch = Batch.lay_out(spans, self.device)
        return self.model(self._batch, self.pool.layers)

    def read(self, result: UnreadResult) -> StepResult:
        """Waits for a step. Raises RanksLost."""
        with self._waiting():
            return result.read()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """A context in which the host waits for the device, if it is another one. Raises
        RanksLost."""
        if self.ranks is None:
            yield
            return
        # Without all ranks, the device has no result, whatever it says.
        try:
            # On the CPU, this is the work of the leader alone.
            with nullcontext() if self.device.type == "cpu" else self.ranks.waiting():
                yield
        except Exception:
            self.ranks.require()
            raise
        self.ranks.require()

    def require_ranks(self) -> None:
        """Raises RanksLost if a rank has failed."""
        if self.ranks is not None:
            self.ranks.require()

    def follow(self, following: Following, token_ids: Tensor) -> Tensor:
        """Execute the step after the last one, which draws `token_ids`. Returns what `forward`
        does."""
        if self.ranks is None:
            return self.advance(following, token_ids)
        with self.ranks.together():
            self.ranks.send(Follow(following))
            return self.advance(following, token_ids)

    def advance(self, following: Following, token_ids: Tensor | None = None) -> Tensor:
        """The forward pass of `follow` on this rank. `token_ids`: of the first rank, by which the
        others get them."""
        assert self._batch is not None
        if token_ids is None:
            token_ids = torch.empty_like(self._batch.token_ids)
        token_ids = self._shard.first(token_ids[:, None])[:, 0]
        self._batch = self._batch.advanced(token_ids, following)
        return self.model(self._batch, self.pool.layers)

    def draw(self, logits: Tensor, batch: SamplingBatch) -> UnreadResult:
        """Draw tokens after a forward pass, and read the logits of prompts. Raises RanksLost."""
        with self._waiting():
            return self._drawn(logits, batch)

    def _drawn(self, logits: Tensor, batch: SamplingBatch) -> UnreadResult:
        prompts = read_rows(logits, batch.prompts) if batch.prompts else ()
        checks = read_back(take(logits, batch.checked).isfinite().all(1)) if batch.checked else ()
        if not batch.rows:
            return UnreadResult(None, prompts, checks)
        if len(batch.rows) < len(logits):
            logits = take(logits, batch.at)
        return UnreadResult(self._draw(logits, batch), prompts, checks)

    def propose(self, plan: DraftPlan, sampling: Sequence[SamplingInput]) -> list[Proposed]:
        """Execute a plan of the draft model. Returns a draft for each of its spans."""
        assert self.draft is not None
        self.apply(plan.changes)
        return self.draft.propose(plan, sampling)

    def put(self, number: StateRef, copy: Copy) -> None:
        """Keep a copy that does not come from a slot."""
        self.pool.kept[number.number] = copy

    def copy_of(self, copy: StateRef) -> Copy | None:
        """Implements `Tensors`."""
        return self.pool.kept.get(copy.number)

    def copies_of_pages(self, pages: Sequence[int], tokens: int) -> list[Copy]:
        """Implements `Tensors`. All changes are made."""
        return self.pool.copies_of_pages(pages, tokens)

    def require_one_rank(self) -> None:
        """Refuse to read or to give state of which each rank has a part. Raises JobError."""
        if self.ranks is not None:
            raise invalid(
                "state of a model on several ranks can't be saved or loaded: load it without "
                "tensor_parallel",
                "tensor_parallel",
            )

    def close(self) -> None:
        """Free the models and the caches."""
        if self.ranks is not None:
            self.ranks.close()
        self.pool.close()
        del self.model
        self.draft = self._batch = None
