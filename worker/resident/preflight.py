"""What a model is and whether it can run here, told before a weight is read.

From config, tokenizer and template alone, and from the headers of the weight files where they are
there: a model on the hub is judged before its weights are fetched. The model is built on torch's
`meta` device, where tensors have shapes and no memory.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import prod

import torch

from jobs.errors import JobError
from worker.loading import weights
from worker.loading.checkpoint import Checkpoint
from worker.loading.config import GenerationDefaults, ModelConfig, read_config, read_defaults
from worker.loading.source import ModelFiles
from worker.loading.tokenizer import Tokenizer
from worker.models.model import Placement
from worker.models.registry import FAMILIES
from worker.prompt.template import ChatTemplate, end_of_turn
from worker.resident import device as devices


@dataclass(frozen=True)
class Preflight:
    """A model that this version can run, and what it needs of the device."""

    files: ModelFiles
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults
    tied: bool
    headers: bool  # the weight files are there, and their headers are what the config wants
    parameters: int
    dtype: torch.dtype
    device: torch.device
    context_length: int  # positions that the model was made for
    longest: int  # tokens of one sequence whose cache fits beside the weights
    free_bytes: int  # of the device, now

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype.itemsize

    @property
    def obstacle(self) -> str | None:
        """Why it doesn't fit on the device, and what to do."""
        if self.weight_bytes <= self.free_bytes:
            return None
        need, free = self.weight_bytes / 2**30, self.free_bytes / 2**30
        return (
            f"{self.files.reference} needs {need:.1f} GiB for its weights in {self.dtype_name} and "
            f"{self.device} has {free:.1f} GiB free: use a smaller model, another dtype or another "
            "device"
        )

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def require_room(self) -> None:
        """Raise JobError("out_of_memory") if the weights don't fit."""
        if self.obstacle is not None:
            raise JobError("out_of_memory", self.obstacle)


def preflight(
    files: ModelFiles, device: torch.device, dtype: str, *, headers: bool = True
) -> Preflight:
    """Check all that can be checked without reading a weight. `headers`: look at the weight files.

    Raises JobError: model_not_found, unsupported_model, invalid_request.
    """
    config = read_config(files.folder, files.reference, FAMILIES)
    tokenizer = Tokenizer(files.folder)
    template = ChatTemplate.read(files.folder, tokenizer)
    defaults = read_defaults(files.folder, config)
    if template is not None:
        end = end_of_turn(template, tokenizer)
        defaults = defaults if end is None else defaults.ending_with(end)
    if headers:
        with Checkpoint(files.folder) as checkpoint:
            stored = checkpoint.dtype()
            tied = weights.is_tied(config.tied, checkpoint)
    else:
        stored, tied = config.dtype, config.tied
    chosen = devices.choose_dtype(dtype, stored, device)
    try:
        shape = FAMILIES[config.model_type](
            config.fields, tied, Placement(chosen, torch.device("meta"))
        )
    except RuntimeError as error:  # torch's, where the product of two sizes is no number any more
        fact = str(error).splitlines()[0]
        raise config.fields.error(f"its sizes make tensors that can't be ({fact})") from None
    tokenizer = tokenizer.limited_to(shape.vocab_size)
    slots = shape.weight_map()
    if headers:
        weights.check(slots, checkpoint)
    parameters = sum(prod(slot.shape) for slot in slots.values())
    caches, free = shape.make_caches(), devices.free_bytes(device)
    left = devices.cache_share(free - parameters * chosen.itemsize, device)
    return Preflight(
        files=files,
        config=config,
        tokenizer=tokenizer,
        template=template,
        defaults=defaults,
        tied=tied,
        headers=headers,
        parameters=parameters,
        dtype=chosen,
        device=device,
        context_length=shape.context_length,
        longest=bisect_right(
            range(1, shape.context_length + 1),
            left,
            key=lambda tokens: sum(cache.bytes_for(1, tokens) for cache in caches),
        ),
        free_bytes=free,
    )
