"""Fills a model's slots from a checkpoint, one tensor at a time.

Names and shapes are compared before any weight is read. Errors name tensors that are missing,
unused or of the wrong shape.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jobs.errors import JobError
from jobs.sizes import counted
from worker.checkpoint.dtypes import FROM_SAFETENSORS
from worker.checkpoint.headers import Checkpoint, Headers, TensorHeader
from worker.checkpoint.quantization import ALTERNATIVE, FP8, Mxfp4, Quantization
from worker.layers.weights.quantised_tensor import QuantisedTensor, Weight
from worker.layers.weights.slot import StackedPlace, WeightSlot

logger = logging.getLogger(__name__)

# transformers' wrappers around a text model (vision-language models) add prefixes to its tensors'
# names. All are read as `model.…` and `lm_head.…`.
PREFIXES = (
    ("model.language_model.model.", "model."),
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
# Not part of a text model: vision towers, multi-token prediction, stored RoPE frequencies.
IGNORED = re.compile(
    r"(model\.)?(visual|vision_tower|multi_modal_projector)\.|mtp\.|.*\.rotary_emb\.inv_freq$"
)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The checkpoint tensor that holds a slot's values, or stacks them with others'."""

    name: str
    shape: tuple[int, ...]  # of the checkpoint tensor, dequantised
    stacked: StackedPlace | None = None
    scale: str | None = None  # name of the tensor that holds its scales
    quantization: Quantization | None = None

    def read(self, checkpoint: Checkpoint) -> Weight:
        """The values, where possible as a view of the mapped file. FP8 and MXFP4 are
        dequantised."""
        tensor, place = checkpoint.read(self.name), self.stacked
        if place is not None:
            tensor = tensor[place.index]
        rows = None if place is None else place.rows
        if self.quantization is not None and self.scale is not None:
            scale = checkpoint.read(self.scale)
            assert isinstance(tensor, Tensor) and isinstance(scale, Tensor)
            if place is not None and scale.dim() > 0 and scale.numel() > 1:
                scale = scale[place.index]
            if place is not None and place.transposed and self.quantization.transposes:
                # Only the rows of this slot are dequantised.
                return self.quantization.dequantise(tensor[rows], scale[rows]).T
            tensor = self.quantization.dequantise(tensor, scale)
        if place is not None and place.transposed:
            assert isinstance(tensor, Tensor)
            return tensor.T[rows].contiguous()
        return tensor if rows is None else tensor[rows]


def sources(
    checkpoint: Headers, quantization: Quantization | None = None
) -> dict[str, TensorSource]:
    """The text model's tensors by name without wrapper prefix. Raises JobError."""
    found: dict[str, TensorSource] = {}
    unread: dict[str, str] = {}  # tensors of other dtypes
    for name, header in checkpoint.tensors.items():
        if IGNORED.match(name) or (
            quantization and quantization.is_scale(name, checkpoint.tensors)
        ):
            continue
        quantised = quantization is not None and header.dtype == quantization.dtype
        if header.dtype not in checkpoint.readable and not quantised:
            unread[name] = header.dtype
        plain = quantization.weight_name(name) if quantization and quantised else name
        for prefix, replacement in PREFIXES:
            if name.startswith(prefix):
                plain = replacement + plain.removeprefix(prefix)
                break
        if plain in found:
            raise _stored_twice(checkpoint, plain, found[plain].name, name)
        found[plain] = _source(checkpoint, name, header, quantization)
    if unread:
        raise _quantised(checkpoint, unread)
    return found


def _source(
    checkpoint: Headers, name: str, header: TensorHeader, quantization: Quantization | None
) -> TensorSource:
    if quantization is None or header.dtype != quantization.dtype:
        return TensorSource(name, header.shape)
    scale = quantization.scale_of(name, checkpoint.tensors)
    where = f"{checkpoint.location}: tensor {name} is stored as {header.dtype}"
    if scale is None:
        raise JobError("unsupported_model", f"{where} without a scale: {ALTERNATIVE}")
    stored = checkpoint.tensors[scale]
    fits = quantization.fits(header.shape, stored.shape)
    if not fits or stored.dtype not in quantization.scale_dtypes:
        raise JobError(
            "unsupported_model",
            f"{where} {list(header.shape)}, and its scale {scale} as {stored.dtype} "
            f"{list(stored.shape)} doesn't fit the quantization_config: {ALTERNATIVE}",
        )
    shape = quantization.weight_shape(header.shape)
    return TensorSource(name, shape, scale=scale, quantization=quantization)


def _quantised(checkpoint: Headers, unread: Mapping[str, str]) -> JobError:
    """The error for tensors that hold no plain floats, which only quantised checkpoints have."""
    name = min(unread)
    readable = {FP8, Mxfp4.dtype} & set(unread.values())
    hint = "its config.json has no quantization_config for them; " if readable else ""
    return JobError(
        "unsupported_model",
        f"{checkpoint.location} stores {len(unread)} of its {len(checkpoint.tensors)} tensors as "
        f"{', '.join(sorted(set(unread.values())))}, such as {name}, like a quantised checkpoint; "
        f"{hint}supported: {', '.join(FROM_SAFETENSORS)}, and {FP8} or {Mxfp4.dtype} "
        f"({Mxfp4.name}) with a quantization_config: "
        f"{ALTERNATIVE}",
    )


def check(
    slots: Mapping[str, WeightSlot], checkpoint: Headers, quantization: Quantization | None = None
) -> dict[str, TensorSource]:
    """Compare names and shapes without reading weights. Returns the source of each slot's tensor.

    Raises JobError("unsupported_model").
    """
    stored = sources(checkpoint, quantization)
    if HEAD in stored and HEAD not in slots:
        del stored[HEAD]  # tied: the file has a copy of the embedding
    where = checkpoint.location
    found: dict[str, TensorSource] = {}
    for name, slot in slots.items():
        own = stored.get(name)
        stack = stored.get(slot.stacked.name) if slot.stacked else None
        if own is not None and stack is not None:
            raise _stored_twice(checkpoint, name, own.name, stack.name)
        if own is not None:
            found[name] = own
        elif stack is not None:
            found[name] = replace(stack, stacked=slot.stacked)
    missing = slots.keys() - found.keys()
    if missing:
        names = map(checkpoint.label, missing)
        raise JobError("unsupported_model", f"{where} lacks {_listed(names)}")
    used = {source.name for source in found.values()}
    unused = {name for name, source in stored.items() if source.name not in used}
    if unused:
        names = map(checkpoint.label, unused)
        raise JobError(
            "unsupported_model", f"{where} has {_listed(names)} that the model does not use"
        )
    for name, slot in slots.items():
        source = found[name]
        shape = slot.shape if source.stacked is None else source.stacked.shape
        if source.shape != shape:
            has = "has shape" if source.quantization is None else "dequantises to"
            raise JobError(
                "unsupported_model",
                f"{where}: tensor {checkpoint.label(source.name)} {has} {list(source.shape)}, "
                f"its {checkpoint.described_by} requires {list(shape)}",
            )
    return found


def load(
    slots: Mapping[str, WeightSlot],
    checkpoint: Checkpoint,
    quantization: Quantization | None = None,
) -> None:
    """Read every tensor into its slot. Raises JobError("unsupported_model")."""
    found = check(slots, checkpoint, quantization)
    ignored = sum(bool(IGNORED.match(name)) for name in checkpoint.tensors)
    if ignored:
        logger.info(
            "%s: ignored %s outside the text model (vision, multi-token prediction)",
            checkpoint.location,
            counted(ignored, "tensor"),
        )
    dequantised = {source.name for source in found.values() if source.quantization is not None}
    if quantization is not None and dequantised:
        logger.info(
            "%s: %d %s tensors are dequantised while they are loaded",
            checkpoint.location,
            len(dequantised),
            quantization.name,
        )
    for name, slot in slots.items():
        slot.fill(found[name].read(checkpoint))


def find_non_finite(checkpoint: Checkpoint, dtype: torch.dtype, seconds: float) -> str:
    """Explain non-finite logits: names the first tensor that holds NaN or infinity, or that
    overflows `dtype`. Gives up after `seconds`. Raises JobError if a file can't be read."""
    kind = str(dtype).removeprefix("torch.")
    other = "load with another dtype, such as fp32"
    deadline = time.monotonic() + seconds
    for name, header in checkpoint.tensors.items():
        if IGNORED.match(name):
            continue
        if time.monotonic() > deadline:
            return f"its weights hold NaN or {kind} overflows; check the files or {other}"
        tensor = checkpoint.read(name)
        if isinstance(tensor, QuantisedTensor):
            tensor = tensor.dequantise(torch.float32)
        if tensor.dtype.itemsize == 1:  # FP8, which torch doesn't compare
            tensor = tensor.float()
        where = f"tensor {checkpoint.label(name)} in {header.file}"
        if not tensor.isfinite().all():
            what = "NaN" if tensor.isnan().any() else "infinity"
            return f"{where} holds {what}; download the model again"
        if not tensor.to(dtype).isfinite().all():
            return f"{where} overflows {kind}; {other}"
    return f"all weights are finite: a computation overflows {kind}; {other}"


def is_tied(
    configured: bool, checkpoint: Headers, quantization: Quantization | None = None
) -> bool:
    """True if the head uses the embedding's weight. A head in the files takes precedence over the
    config, unless the config ties the two and they are equal. Headers alone can't be compared."""
    found = sources(checkpoint, quantization)
    if HEAD not in found:
        if not configured:
            raise JobError(
                "unsupported_model",
                f"{checkpoint.location} lacks {HEAD}, and its config.json doesn't tie it to the "
                "embedding (tie_word_embeddings)",
            )
        return True
    if not configured or EMBEDDING not in found:
        return False
    if not isinstance(checkpoint, Checkpoint):
        return True
    head, embedding = found[HEAD].read(checkpoint), found[EMBEDDING].read(checkpoint)
    if not isinstance(head, Tensor) or not isinstance(embedding, Tensor):
        return False
    return head.shape == embedding.shape and bool((head == embedding).all())


def _stored_twice(checkpoint: Headers, name: str, first: str, second: str) -> JobError:
    return JobError(
        "unsupported_model", f"{checkpoint.location} has {name} twice: as {first} and as {second}"
    )


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(set(names))
    shown = ", ".join(ordered[:4])
    more = f" and {len(ordered) - 4} more" if len(ordered) > 4 else ""
    return f"the tensor{'s' * (len(ordered) > 1)} {shown}{more}"
