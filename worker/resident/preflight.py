"""Checks whether a model can run here before any weight is read.

The model is built on torch's `meta` device, where tensors have shapes and no memory. A hub model is
checked twice: from its configuration alone before its weights are downloaded, then against the
headers of the weight files.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import prod

import torch

from jobs.errors import JobError
from worker.loading import weights
from worker.loading.checkpoint import Checkpoint
from worker.loading.dtypes import name_of
from worker.loading.tokenizer import Tokenizer
from worker.models.model import Placement
from worker.models.registry import FAMILIES
from worker.resident import device as devices
from worker.resident.description import ModelDescription


@dataclass(frozen=True)
class Preflight:
    """A model that this version supports, and the memory that it needs on the device."""

    model: ModelDescription
    tokenizer: Tokenizer  # limited to the ids that the model has
    tied: bool
    parameters: int
    dtype: torch.dtype
    device: torch.device
    context_length: int  # positions that the config gives, with their stretch
    longest: int  # tokens of one sequence whose cache fits beside the weights
    free_bytes: int  # of the device, now

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return name_of(self.dtype)

    @property
    def obstacle(self) -> str | None:
        """Why the weights don't fit on the device, and what to do; None if they fit."""
        if self.weight_bytes <= self.free_bytes:
            return None
        need, free = self.weight_bytes / 2**30, self.free_bytes / 2**30
        return (
            f"{self.model.source.reference} needs {need:.1f} GiB for its weights in "
            f"{self.dtype_name} and {self.device} has {free:.1f} GiB free: use a smaller model, "
            "another dtype or another device"
        )

    def require_room(self) -> None:
        """Raise JobError("out_of_memory") if the weights don't fit."""
        if self.obstacle is not None:
            raise JobError("out_of_memory", self.obstacle)


def preflight(
    model: ModelDescription, device: torch.device, dtype: str, checkpoint: Checkpoint | None
) -> Preflight:
    """Check everything that can be checked without reading weights.

    checkpoint: the open weights; None if they aren't downloaded yet, so that config.json alone
    decides. Raises JobError: model_not_found, unsupported_model, invalid_request.
    """
    config = model.config
    if checkpoint is None:
        stored, tied = config.dtype, config.tied
    else:
        stored, tied = checkpoint.dtype(), weights.is_tied(config.tied, checkpoint)
    chosen = devices.choose_dtype(dtype, stored, device)
    try:
        shape = FAMILIES[config.model_type](
            config.fields, tied, Placement(chosen, torch.device("meta"))
        )
    except RuntimeError as error:  # torch's, if the product of two sizes overflows
        fact = str(error).splitlines()[0]
        raise config.fields.error(f"its sizes make impossible tensors ({fact})") from None
    tokenizer = model.tokenizer.limited_to(shape.vocab_size)
    slots = shape.weight_map()
    if checkpoint is not None:
        weights.check(slots, checkpoint)
    parameters = sum(prod(slot.shape) for slot in slots.values())
    caches, free = shape.make_caches(), devices.free_bytes(device)
    cache_bytes = devices.cache_share(free - parameters * chosen.itemsize, device)
    return Preflight(
        model=model,
        tokenizer=tokenizer,
        tied=tied,
        parameters=parameters,
        dtype=chosen,
        device=device,
        context_length=shape.context_length,
        longest=bisect_right(
            range(1, shape.context_length + 1),
            cache_bytes,
            key=lambda tokens: sum(cache.bytes_for(1, tokens) for cache in caches),
        ),
        free_bytes=free,
    )
