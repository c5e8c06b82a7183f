"""Fills a model's slots from a checkpoint, one tensor at a time.

Names and shapes are compared before any weight is read; what is missing, left over or of the wrong
shape is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from jobs.types import JobError
from worker.layers.weight import WeightSlot
from worker.loading.checkpoint import Checkpoint

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


def plain_names(checkpoint: Checkpoint) -> dict[str, str]:
    """The text model's tensors: plain name → name in the files. Raises JobError."""
    names: dict[str, str] = {}
    for name in checkpoint.tensors:
        if IGNORED.match(name):
            continue
        plain = name
        for prefix, replacement in PREFIXES:
            if name.startswith(prefix):
                plain = replacement + name.removeprefix(prefix)
                break
        if plain in names:
            raise JobError(
                "unsupported_model",
                f"{checkpoint.folder} has {plain} twice: as {names[plain]} and as {name}",
            )
        names[plain] = name
    return names


def load(slots: Mapping[str, WeightSlot], checkpoint: Checkpoint) -> None:
    """Read every tensor into its slot. Raises JobError("unsupported_model")."""
    names = plain_names(checkpoint)
    if HEAD in names and HEAD not in slots:
        del names[HEAD]  # tied: the file keeps a copy of the embedding
    where = checkpoint.folder
    missing = slots.keys() - names.keys()
    if missing:
        raise JobError("unsupported_model", f"{where} lacks {_some(missing)}")
    left = names.keys() - slots.keys()
    if left:
        raise JobError(
            "unsupported_model", f"{where} has {_some(left)} that the model has no use for"
        )
    for name, slot in slots.items():
        shape = checkpoint.tensors[names[name]].shape
        if shape != slot.shape:
            raise JobError(
                "unsupported_model",
                f"{where}: tensor {names[name]} has shape {list(shape)}, "
                f"its config.json wants {list(slot.shape)}",
            )
    for name, slot in slots.items():
        slot.load(checkpoint.read(names[name]))


def is_tied(configured: bool, checkpoint: Checkpoint) -> bool:
    """Whether the head is the embedding: a head in the files counts more than the config, unless
    the config ties and both are the same."""
    names = plain_names(checkpoint)
    if HEAD not in names:
        if not configured:
            raise JobError(
                "unsupported_model",
                f"{checkpoint.folder} lacks {HEAD}, and its config.json doesn't tie it to the "
                "embedding (tie_word_embeddings)",
            )
        return True
    if not configured or EMBEDDING not in names:
        return False
    head, embedding = checkpoint.read(names[HEAD]), checkpoint.read(names[EMBEDDING])
    return head.shape == embedding.shape and bool((head == embedding).all())


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:4])
    more = f" and {len(ordered) - 4} more" if len(ordered) > 4 else ""
    return f"the tensor{'s' * (len(ordered) > 1)} {shown}{more}"
