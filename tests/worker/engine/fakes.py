"""Cache layers and sequences without a model, for unit tests of the scheduler and the pool."""

from __future__ import annotations

from worker.engine.sampling_plan import plan_sampling
from worker.engine.sequence import Sequence, TokenEvent
from worker.loading.config import GenerationDefaults
from worker.loading.tokenizer import Tokenizer
from worker.text.detokenizer import Detokenizer
