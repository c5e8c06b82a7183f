"""Fills a model's slots from a checkpoint, one tensor at a time.

Names and shapes are compared before any weight is read; what is missing, left over or of the wrong
shape is named.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from jobs.errors import JobError
from worker.layers.weight import WeightSlot
from worker.loading.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

# Text models are wrapped in different ways; all read as `model.…` and `lm_head.…`.
PREFIXES = (
    ("model.language_model.model.", "model."),
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
# Vision towers, multi-token prediction and stored angles are not part of the text model.
IGNORED = re.compile(
    r"(model\.)?(visual|vision_tower|multi_modal_projector)\.|mtp\.|.*\.rotary_emb\.inv_freq$"
)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# All experts of a layer in one tensor, as Qwen3.5-MoE is published: [experts, 2 inner, hidden] with
# the gate's rows first, and [experts, hidden, inner].
FUSED = re.compile(r"(?P<experts>.+\.experts)\.(?P<part>gate_up|down)_proj")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor of the model lies: a tensor of the files, or rows of one expert in it."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    rows: slice | None = None  # of the expert: all if None

    def read(self, checkpoint: Checkpoint) -> Tensor:
        """The values, as a view of the mapped file."""
        tensor = checkpoint.read(self.name)
        return tensor if self.expert is None else tensor[self.expert][self.rows or slice(None)]


def sources(checkpoint: Checkpoint) -> dict[str, Source]:
    """The text model's tensors by their plain names. Raises JobError."""
    found: dict[str, Source] = {}
    for name, header in checkpoint.tensors.items():
        if IGNORED.match(name):
            continue
        plain = name
        for prefix, replacement in PREFIXES:
            if name.startswith(prefix):
                plain = replacement + name.removeprefix(prefix)
                break
        for part, source in _unfused(plain, Source(name, header.shape)):
            if part in found:
                raise JobError(
                    "unsupported_model",
                    f"{checkpoint.folder} has {part} twice: as {found[part].name} and as {name}",
                )
            found[part] = source
    return found


def _unfused(plain: str, source: Source) -> Iterator[tuple[str, Source]]:
    """The tensors that are in one tensor of the files; most often itself."""
    match = FUSED.fullmatch(plain)
    if match is None or len(source.shape) != 3 or 0 in source.shape:
        yield plain, source
        return
    experts, rows, columns = source.shape
    half = rows // 2
    parts = {
        "gate_up": (("gate_proj", slice(half), half), ("up_proj", slice(half, rows), rows - half)),
        "down": (("down_proj", None, rows),),
    }[match["part"]]
    for expert in range(experts):
        for name, taken, count in parts:
            shape = (count, columns)
            yield (
                f"{match['experts']}.{expert}.{name}.weight",
                Source(source.name, shape, expert, taken),
            )


def check(slots: Mapping[str, WeightSlot], checkpoint: Checkpoint) -> dict[str, Source]:
    """Compare names and shapes; reads no weight. Answers where the tensor of each slot lies.

    Raises JobError("unsupported_model").
    """
    found = sources(checkpoint)
    if HEAD in found and HEAD not in slots:
        del found[HEAD]  # tied: the file keeps a copy of the embedding
    where = checkpoint.folder
    missing = slots.keys() - found.keys()
    if missing:
        raise JobError("unsupported_model", f"{where} lacks {_some(missing)}")
    left = found.keys() - slots.keys()
    if left:
        raise JobError(
            "unsupported_model", f"{where} has {_some(left)} that the model has no use for"
        )
    for name, slot in slots.items():
        if found[name].shape != slot.shape:
            raise JobError(
                "unsupported_model",
                f"{where}: tensor {found[name].name} has shape {list(found[name].shape)}, "
                f"its config.json wants {list(slot.shape)}",
            )
    return found


def load(slots: Mapping[str, WeightSlot], checkpoint: Checkpoint) -> None:
    """Read every tensor into its slot. Raises JobError("unsupported_model")."""
    found = check(slots, checkpoint)
    others = sum(bool(IGNORED.match(name)) for name in checkpoint.tensors)
    if others:
        logger.info(
            "%s: %d %s the text model's (vision, multi-token prediction) %s passed over",
            checkpoint.folder,
            others,
            "tensor that isn't" if others == 1 else "tensors that aren't",
            "is" if others == 1 else "are",
        )
    for name, slot in slots.items():
        slot.load(found[name].read(checkpoint))


def blame(checkpoint: Checkpoint, dtype: torch.dtype, seconds: float) -> str:
    """Why logits are not finite: names the first tensor that holds NaN or infinity, or overflows
    `dtype`. Gives up after `seconds`. Raises JobError if a file can't be read any more."""
    kind = str(dtype).removeprefix("torch.")
    other = "load with another dtype, such as fp32"
    deadline = time.monotonic() + seconds
    for name, header in checkpoint.tensors.items():
        if IGNORED.match(name):
            continue
        if time.monotonic() > deadline:
            return f"its weights hold NaN or {kind} overflows; check the files or {other}"
        tensor = checkpoint.read(name)
        if not tensor.isfinite().all():
            what = "NaN" if tensor.isnan().any() else "infinity"
            return f"tensor {name} in {header.file} holds {what}; download the model again"
        if not tensor.to(dtype).isfinite().all():
            return f"tensor {name} in {header.file} overflows {kind}; {other}"
    return f"all its weights are, so it is {kind} that overflows; {other}"


def is_tied(configured: bool, checkpoint: Checkpoint) -> bool:
    """Whether the head is the embedding: a head in the files counts more than the config, unless
    the config ties and both are the same."""
    found = sources(checkpoint)
    if HEAD not in found:
        if not configured:
            raise JobError(
                "unsupported_model",
                f"{checkpoint.folder} lacks {HEAD}, and its config.json doesn't tie it to the "
                "embedding (tie_word_embeddings)",
            )
        return True
    if not configured or EMBEDDING not in found:
        return False
    head, embedding = found[HEAD].read(checkpoint), found[EMBEDDING].read(checkpoint)
    return head.shape == embedding.shape and bool((head == embedding).all())


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:4])
    more = f" and {len(ordered) - 4} more" if len(ordered) > 4 else ""
    return f"the tensor{'s' * (len(ordered) > 1)} {shown}{more}"
