"""The activations of a step: memory that it takes beside weights and caches.

Under a budget, the first load of a model on this machine measures them with a step of as many
tokens as a step may have. The number is kept beside the choices of the kernels, so that the next
start counts with it before a weight is read. Until then they are estimated from the config.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch

from jobs.sizes import size_text
from worker.cache.changes import Place, Resize
from worker.cache.pool import CachePool
from worker.checkpoint.config import ModelConfig
from worker.device import computing, device_name, is_out_of_memory, limits, threads_of
from worker.kernels.choices import Choices
from worker.layers.batch import Batch, Span, row_order
from worker.layers.cache import Size, by_slot, paged, pages_for
from worker.loading.load import LoadedModel
from worker.loading.preflight import Preflight
from worker.model_spec import ModelSpec
from worker.models.model import Model
from worker.processes.pages import trim_heap
from worker.processes.resident import anonymous_bytes
from worker.processes.tuning import returning_nothing

logger = logging.getLogger(__name__)

FLOAT_BYTES = 4


class Activations(NamedTuple):
    nbytes: int
    measured: bool


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the activations of a model depend on."""

    config: ModelConfig
    formats: str  # of the weights in memory
    device: torch.device
    tokens: int  # of a step, at most
    batch: int  # sequences, at most
    context: int

    @classmethod
    def of(
        cls, config: ModelConfig, formats: str, device: torch.device, spec: ModelSpec, context: int
    ) -> StepShape:
        """`context`: of the model, unless `spec` has one."""
        place = limits(device)
        batch = place.max_batch if spec.max_batch is None else spec.max_batch
        return cls(config, formats, device, place.step_tokens, batch, spec.context or context)

    def sampling(self, vocab: int) -> int:
        """The logits of a full batch as float32, with two copies in the sampler."""
        return 3 * self.batch * vocab * FLOAT_BYTES

    @property
    def kept(self) -> Choices:
        """The numbers that were measured on such a device."""
        return Choices(device_name(self.device), 0)

    @property
    def name(self) -> str:
        """The name of its number."""
        config = json.dumps(self.config.fields.values, sort_keys=True, default=str)
        facts = f"{config} {self.formats} {self.tokens} {self.batch} {self.context}"
        return f"bytes of activations of {blake2b(facts.encode(), digest_size=16).hexdigest()}"


def activations_of(found: Preflight, spec: ModelSpec) -> Activations:
    """The peak of a step of a model that is not loaded, with that of its sampling."""
    config, context = found.model.source.config, found.context_length
    shape = StepShape.of(config, found.formats, found.device, spec, context)
    hidden, widest, vocab = found.widths
    forward = shape.kept.known(shape.name)
    measured = forward is not None
    if forward is None:  # hidden states and the widest projection of all tokens, as float32
        forward = shape.tokens * (4 * hidden + 3 * widest) * FLOAT_BYTES
    return Activations(forward + shape.sampling(vocab), measured)


def measure_once(loaded: LoadedModel, spec: ModelSpec) -> None:
    """Measure the activations of a loaded model, unless that was done on this machine."""
    info, device = loaded.info, loaded.device
    shape = StepShape.of(loaded.source.config, info.dtype, device, spec, info.context_length)
    if shape.kept.known(shape.name) is not None:
        return
    try:
        threads = threads_of(info.weight_bytes) if device.type == "cpu" else None
        with computing(device, threads):
            nbytes = forward_peak(loaded.model, device, shape.tokens, shape.context)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        text = "%s: no memory for a step of %d tokens, by which its activations are measured"
        logger.warning(text, info.name, shape.tokens)
        return
    if nbytes > 0:  # else the system does not say
        shape.kept.keep(shape.name, nbytes)
        logger.info(
            "%s: a step of %d tokens takes %s for activations, which its share counts from the "
            "next start on",
            info.name,
            shape.tokens,
            size_text(nbytes),
        )


@torch.inference_mode()
def forward_peak(model: Model, device: torch.device, tokens: int, context: int) -> int:
    """Bytes that the forward pass of `tokens` tokens takes at most, in as few sequences as the
    context allows. 0 if the system does not say."""
    lengths = [context] * (tokens // context) + [tokens % context] * (tokens % context > 0)
    pool = CachePool(model.make_caches, slots=len(lengths), device=device)
    rows = [(slot, at) for slot, count in enumerate(lengths) for at in range(pages_for(count))]
    pool.execute(Resize(Size(len(lengths), max(lengths), len(rows)), 0))
    pool.execute(Place(tuple((*row, page) for page, row in enumerate(rows))))
    for part in (part for layer in paged(pool.layers) for part in layer.storage()):
        part.zero_()  # so that its memory is resident
    for layer in by_slot(pool.layers):
        for slot, count in enumerate(lengths):
            for view in layer.views(slot, count):
                view.zero_()
    spans = [Span(slot, 0, [0] * count, count) for slot, count in enumerate(lengths)]
    batch = Batch.lay_out(row_order(spans), device)
    found = [0]
    with _peak(device, found):
        logits = model(batch, pool.layers)
    del logits
    pool.close()
    return found[0]


@contextmanager
def _peak(device: torch.device, found: list[int]) -> Iterator[None]:
    """Write into `found` by how many bytes the memory in use grows at most inside."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield
        found[0] = torch.cuda.max_memory_allocated(device) - before
        return
    trim_heap()  # memory that is free now would be used again without being seen
    with returning_nothing():
        before = anonymous_bytes()
        yield
        found[0] = anonymous_bytes() - before
    trim_heap()
