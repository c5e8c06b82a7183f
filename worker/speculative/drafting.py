"""The options of drafting, checked and resolved when an engine is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from jobs.errors import JobError, invalid
from jobs.sizes import counted
from worker.cache.book import CacheBook
from worker.device import Device
from worker.layers.cache import LayerCache
from worker.loading.draft import load_draft
from worker.loading.find import find
from worker.loading.load import HostModels, LoadedModel
from worker.loading.preflight import smallest_window
from worker.model_spec import NGRAM, ModelSpec
from worker.models.model import Model
from worker.option_values import MOST_DRAFT_TOKENS
from worker.speculative.model_proposer import ModelProposer, Run
from worker.speculative.ngram import NgramProposer
from worker.speculative.proposer import Proposer

logger = logging.getLogger(__name__)

DRAFT_TOKENS = 4  # by default


@dataclass(frozen=True, slots=True)
class Drafting:
    """The options: a draft model, or None for the lookup of n-grams. `tokens`: the limit of tokens
    per draft."""

    tokens: int
    loaded: LoadedModel | None = None

    @property
    def weight_bytes(self) -> int:
        return 0 if self.loaded is None else self.loaded.info.weight_bytes

    @property
    def model(self) -> Model | None:
        return None if self.loaded is None else self.loaded.model

    def make_caches(self) -> list[LayerCache]:
        return [] if self.model is None else self.model.make_caches()

    def make_proposer(self, book: CacheBook, run: Run, step_tokens: int) -> Proposer:
        """`run` executes the plans of a draft model, of at most `step_tokens` new tokens."""
        if self.model is None:
            return NgramProposer()
        return ModelProposer(
            run,
            book,
            context=self.model.context_length,
            vocab_size=self.model.vocab_size,
            step_tokens=step_tokens,
        )


def drafting_of(spec: ModelSpec, device: Device, host: HostModels | None = None) -> Drafting | None:
    """Check the options and load the draft, if it is a model; the model that it drafts for has not
    been loaded yet. Raises JobError."""
    if spec.draft is None:
        if spec.draft_tokens is not None:
            raise invalid("draft_tokens needs a draft: a model, or 'ngram'", "draft_tokens")
        return None
    most = DRAFT_TOKENS if spec.draft_tokens is None else spec.draft_tokens
    if type(most) is not int or not 1 <= most <= MOST_DRAFT_TOKENS:
        raise invalid(
            f"draft_tokens must be 1 to {MOST_DRAFT_TOKENS}, got {most!r}", "draft_tokens"
        )
    sources, draft = [find(spec.reference, spec.download_dir)], spec.draft_spec
    if draft is not None:
        try:
            sources.append(find(draft.reference, draft.download_dir))
        except JobError as error:
            fact = f"draft '{spec.draft}': {error.message}; '{NGRAM}' needs no model"
            raise JobError(error.code, fact, "draft") from None
    windows = [smallest_window(one.config, device.torch) for one in sources]
    least = min((window for window in windows if window is not None), default=most + 1)
    if most >= least:
        raise invalid(
            f"draft_tokens is {most} and the smallest sliding window is {least}: use "
            + (f"at most {least - 1}" if least > 1 else "no draft"),
            "draft_tokens",
        )
    logger.info("drafts for %s: %s, at most %s", spec.reference, spec.draft, counted(most, "token"))
    return Drafting(most, None if draft is None else load_draft(draft, spec, device, host))
