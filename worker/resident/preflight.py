"""Checks whether a model can run here before any weight is read.

The model is built on torch's `meta` device, where tensors have shapes and no memory, and compared
with the headers of the weight files. Of a hub model, the headers alone are fetched for this.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import prod

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jobs.errors import JobError
from worker.layers.kv_cache import WindowKVCache
from worker.layers.quantised import stays_quantised
from worker.layers.weight import WeightSlot
from worker.loading import weights
from worker.loading.checkpoint import Headers, TensorHeader
from worker.loading.config import ModelConfig
from worker.loading.dtypes import name_of
from worker.loading.quantization import DEQUANTISED
from worker.loading.tokenizer import Tokenizer
from worker.models.model import Model, Placement
from worker.models.registry import FAMILIES
from worker.quantise.compression import Compression
from worker.resident import device as devices
from worker.resident.description import ModelDescription


@dataclass(frozen=True)
class Preflight:
    """A model that this version supports, and the memory that it needs on the device."""

    model: ModelDescription
    tokenizer: Tokenizer  # limited to the ids that the model has
    tied: bool
    parameters: int
    weight_bytes: int  # in memory
    blocks: tuple[str, ...]  # GGUF's quantised types that weights have in memory
    dtype: torch.dtype
    device: torch.device
    context_length: int  # positions that the config gives, with their stretch
    longest: int  # tokens of one sequence whose cache fits beside the weights
    free_bytes: int  # of the device, now

    @property
    def dtype_name(self) -> str:
        return name_of(self.dtype)

    @property
    def formats(self) -> str:
        """How the weights are held in memory: "bfloat16, Q4_K, Q6_K"."""
        return ", ".join((self.dtype_name, *self.blocks))

    @property
    def obstacle(self) -> str | None:
        """Why the weights don't fit on the device, and what to do; None if they fit."""
        if self.weight_bytes <= self.free_bytes:
            return None
        need, free = self.weight_bytes / 2**30, self.free_bytes / 2**30
        return (
            f"{self.model.source.reference} needs {need:.1f} GiB for its weights in "
            f"{self.formats} and {self.device} has {free:.1f} GiB free: use a smaller model, "
            "another dtype or another device"
        )

    def require_room(self) -> None:
        """Raise JobError("out_of_memory") if the weights don't fit."""
        if self.obstacle is not None:
            raise JobError("out_of_memory", self.obstacle)


def preflight(
    model: ModelDescription,
    device: torch.device,
    dtype: str,
    headers: Headers,
    compression: Compression | None = None,
) -> Preflight:
    """Check everything that can be checked without reading weights. `headers` may be a checkpoint.
    Weights that are not quantised in the files are compressed while they are loaded.

    Raises JobError: model_not_found, unsupported_model, invalid_request.
    """
    try:
        return _preflight(model, device, dtype, headers, compression)
    except JobError as error:
        wrapper = model.config.wrapper
        if wrapper is None or error.code != "unsupported_model":
            raise
        raise JobError(
            "unsupported_model",
            f"unsupported model_type '{wrapper}' in {model.source.reference}: its text model "
            f"('{model.config.model_type}') can't be read on its own ({error.message}); supported: "
            f"{', '.join(sorted(FAMILIES))}",
        ) from None


def _preflight(
    model: ModelDescription,
    device: torch.device,
    dtype: str,
    headers: Headers,
    compression: Compression | None,
) -> Preflight:
    config = model.config
    quantization = config.quantization
    tied = weights.is_tied(config.tied, headers, quantization)
    stored = headers.dtype({quantization.dtype} if quantization else ()) or DEQUANTISED
    chosen = devices.choose_dtype(dtype, stored, device)
    shape = _shape(config, tied, chosen, device)
    tokenizer = model.tokenizer.limited_to(shape.vocab_size)
    slots = shape.weight_map()
    found = weights.check(slots, headers, quantization)
    parameters = sum(prod(slot.shape) for slot in slots.values())
    weight_bytes = sum(
        _bytes(slot, headers.tensors[found[name].name], chosen, device, compression)
        for name, slot in slots.items()
    )
    kept = (headers.tensors[found[name].name] for name in slots if slots[name].quantised)
    blocks = {header.dtype for header in kept if _stays_quantised(header, device)}
    if compression is not None:
        blocks |= {
            compression.kind.name
            for name, slot in slots.items()
            if slot.quantised
            and compression.fits(slot.shape)
            and not _stays_quantised(headers.tensors[found[name].name], device)
        }
    caches, free = shape.make_caches(), devices.free_bytes(device)
    cache_bytes = devices.cache_share(free - weight_bytes, device)
    return Preflight(
        model=model,
        tokenizer=tokenizer,
        tied=tied,
        parameters=parameters,
        weight_bytes=weight_bytes,
        blocks=tuple(sorted(blocks)),
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


def smallest_window(config: ModelConfig, device: torch.device) -> int | None:
    """Tokens of the model's smallest sliding window; None: it has none. Raises JobError
    (unsupported_model)."""
    caches = _shape(config, config.tied, config.dtype, device).make_caches()
    windows = [one.window for one in caches if isinstance(one, WindowKVCache) and one.window]
    return min(windows, default=None)


def _shape(config: ModelConfig, tied: bool, dtype: torch.dtype, device: torch.device) -> Model:
    """The model without memory, as it is built for a device."""
    place = Placement(dtype, torch.device("meta"), built_for=device)
    try:
        return FAMILIES[config.model_type](config.fields, tied, place)
    except RuntimeError as error:  # torch's, if the product of two sizes overflows
        fact = str(error).splitlines()[0]
        raise config.fields.error(f"its sizes make impossible tensors ({fact})") from None


def _stays_quantised(header: TensorHeader, device: torch.device) -> bool:
    return header.blocks and stays_quantised(GGMLQuantizationType[header.dtype], device)


def _bytes(
    slot: WeightSlot,
    header: TensorHeader,
    dtype: torch.dtype,
    device: torch.device,
    compression: Compression | None,
) -> int:
    """What a slot's tensor takes in memory."""
    values = prod(slot.shape)
    if slot.quantised and _stays_quantised(header, device):
        per_block, size = GGML_QUANT_SIZES[GGMLQuantizationType[header.dtype]]
        return values // per_block * size
    if slot.quantised and compression is not None and compression.fits(slot.shape):
        return compression.bytes_for(values)
    return values * dtype.itemsize
