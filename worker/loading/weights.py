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
from worker.layers.quantised import QuantisedTensor, Weight
from worker.layers.weight import StackedPlace, WeightSlot
from worker.loading.checkpoint import Checkpoint, Headers, TensorHeader
from worker.loading.dtypes import FROM_SAFETENSORS
from worker.loading.quantization import ALTERNATIVE, FP8, Fp8

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
    shape: tuple[int, ...]  # of the checkpoint tensor
    stacked: StackedPlace | None = None
    scale: str | None = None  # name of the tensor that holds its scales
    fp8: Fp8 | None = None

    def read(self, checkpoint: Checkpoint) -> Weight:
        """The values, as a view of the mapped file. FP8 is dequantised."""
        tensor = checkpoint.read(self.name)
        if self.stacked is not None:
            tensor = tensor[self.stacked.index]
        if self.fp8 is not None and self.scale is not None:
            scale = checkpoint.read(self.scale)
            assert isinstance(tensor, Tensor) and isinstance(scale, Tensor)
            per_expert = self.stacked is not None and scale.dim() > 0 and scale.numel() > 1
            tensor = self.fp8.dequantise(
                tensor, scale[self.stacked.index] if self.stacked and per_expert else scale
            )
        return tensor if self.stacked is None else tensor[self.stacked.rows]


def sources(checkpoint: Headers, fp8: Fp8 | None = None) -> dict[str, TensorSource]:
    """The text model's tensors by name without wrapper prefix. Raises JobError."""
    found: dict[str, TensorSource] = {}
    unread: dict[str, str] = {}  # tensors of other dtypes
    for name, header in checkpoint.tensors.items():
        if IGNORED.match(name) or (fp8 and fp8.is_scale(name, checkpoint.tensors)):
            continue
        if header.dtype not in checkpoint.readable and (fp8 is None or header.dtype != FP8):
            unread[name] = header.dtype
        plain = name
        for prefix, replacement in PREFIXES:
            if name.startswith(prefix):
                plain = replacement + name.removeprefix(prefix)
                break
        if plain in found:
            raise _stored_twice(checkpoint, plain, found[plain].name, name)
        found[plain] = _source(checkpoint, name, header, fp8)
    if unread:
        raise _quantised(checkpoint, unread)
    return found


def _source(checkpoint: Headers, name: str, header: TensorHeader, fp8: Fp8 | None) -> TensorSource:
    if fp8 is None or header.dtype != FP8:
        return TensorSource(name, header.shape)
    scale = fp8.scale_of(name, checkpoint.tensors)
    where = f"{checkpoint.location}: tensor {name} is stored as {FP8}"
    if scale is None:
        raise JobError("unsupported_model", f"{where} without a scale: {ALTERNATIVE}")
    stored = checkpoint.tensors[scale]
    if not fp8.fits(header.shape, stored.shape) or stored.dtype not in FROM_SAFETENSORS:
        raise JobError(
            "unsupported_model",
            f"{where} {list(header.shape)}, and its scale {scale} as {stored.dtype} "
            f"{list(stored.shape)} doesn't fit the quantization_config: {ALTERNATIVE}",
        )
    return TensorSource(name, header.shape, scale=scale, fp8=fp8)


def _quantised(checkpoint: Headers, unread: Mapping[str, str]) -> JobError:
    """The error for tensors that hold no plain floats, which only quantised checkpoints have."""
    name = min(unread)
    hint = "its config.json has no quantization_config for them; " if FP8 in unread.values() else ""
    return JobError(
        "unsupported_model",
        f"{checkpoint.location} stores {len(unread)} of its {len(checkpoint.tensors)} tensors as "
        f"{', '.join(sorted(set(unread.values())))}, such as {name}, like a quantised checkpoint; "
        f"{hint}supported: {', '.join(FROM_SAFETENSORS)}, and {FP8} with a quantization_config: "
        f"{ALTERNATIVE}",
    )


def check(
    slots: Mapping[str, WeightSlot], checkpoint: Headers, fp8: Fp8 | None = None
) -> dict[str, TensorSource]:
    """Compare names and shapes without reading weights. Returns the source of each slot's tensor.

    Raises JobError("unsupported_model").
    """
    stored = sources(checkpoint, fp8)
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
            raise JobError(
                "unsupported_model",
                f"{where}: tensor {checkpoint.label(source.name)} has shape {list(source.shape)}, "
                f"its {checkpoint.described_by} requires {list(shape)}",
            )
    return found


def load(slots: Mapping[str, WeightSlot], checkpoint: Checkpoint, fp8: Fp8 | None = None) -> None:
    """Read every tensor into its slot. Raises JobError("unsupported_model")."""
    found = check(slots, checkpoint, fp8)
    ignored = sum(bool(IGNORED.match(name)) for name in checkpoint.tensors)
    if ignored:
        logger.info(
            "%s: ignored %d tensor%s outside the text model (vision, multi-token prediction)",
            checkpoint.location,
            ignored,
            "" if ignored == 1 else "s",
        )
    dequantised = len({source.name for source in found.values() if source.fp8 is not None})
    if dequantised:
        logger.info(
            "%s: %d FP8 tensors are dequantised while they are loaded",
            checkpoint.location,
            dequantised,
        )
    for name, slot in slots.items():
        slot.fill(found[name].read(checkpoint))


def blame(checkpoint: Checkpoint, dtype: torch.dtype, seconds: float) -> str:
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


def is_tied(configured: bool, checkpoint: Headers, fp8: Fp8 | None = None) -> bool:
    """Whether the head uses the embedding's weight. A head in the files takes precedence over the
    config, unless the config ties the two and they are equal. Headers alone can't be compared."""
    found = sources(checkpoint, fp8)
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
