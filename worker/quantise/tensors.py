"""The tensors of a GGUF file, made from those of a checkpoint: other names, the experts of a layer
stacked, rows in another order, norms with an offset."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from gguf import get_tensor_name_map
from torch import Tensor

from jobs.errors import JobError
from worker.layers.self_attention import HeadShape
from worker.quantise.architectures import FREQUENCIES, Description

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
QUERY_OR_KEY = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")

Read = Callable[[], Tensor]


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the file. `read` computes its values from the checkpoint."""

    name: str
    shape: tuple[int, ...]
    read: Read


def output_tensors(
    description: Description,
    layers: int,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
) -> list[OutputTensor]:
    """The tensors of the file. `shapes` are those of the model's tensors by name; `read` returns
    the values of one of them."""
    architecture = description.architecture
    names = get_tensor_name_map(architecture.number, layers)
    stacks: dict[str, list[str]] = {}  # name in the file → names of one tensor, or of all experts
    for name in shapes:
        match = EXPERT.fullmatch(name)
        whole = f"{match[1]}.{match[3]}" if match else name
        stored = names.get_name(whole, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise JobError("unsupported_model", f"tensor {name} has no name in GGUF files")
        stacks.setdefault(stored, []).append(name)
    outputs = []
    for stored, parts in stacks.items():
        change = _change(stored, description)
        outputs.append(_output(stored, parts, shapes[parts[0]], read, change))
    if description.rope_factors is not None:
        factors = description.rope_factors
        outputs.append(OutputTensor(FREQUENCIES, tuple(factors.shape), lambda: factors))
    return outputs


def _output(
    stored: str,
    parts: list[str],
    shape: tuple[int, ...],
    read: Callable[[str], Tensor],
    change: Callable[[Tensor], Tensor],
) -> OutputTensor:
    if not EXPERT.fullmatch(parts[0]):
        return OutputTensor(stored, shape, lambda: change(read(parts[0])))
    # In the order of the experts, which the names of the parts end with.
    return OutputTensor(
        stored, (len(parts), *shape), lambda: torch.stack([change(read(part)) for part in parts])
    )


def _change(stored: str, description: Description) -> Callable[[Tensor], Tensor]:
    architecture = description.architecture
    match = QUERY_OR_KEY.fullmatch(stored)
    if architecture.permuted and match:
        return lambda tensor: _in_pairs(tensor, description.attention, match[1])
    if architecture.norm_offset and stored.endswith("_norm.weight"):
        return lambda tensor: tensor.float() + architecture.norm_offset
    return lambda tensor: tensor


def _in_pairs(tensor: Tensor, shape: HeadShape, which: str) -> Tensor:
    """Rows of each head: channels i and i + dim / 2, which rotate together, become neighbours."""
    heads = shape.heads if which == "q" else shape.kv_heads
    halves: Tensor = tensor.unflatten(0, (heads, 2, shape.dim // 2))
    return halves.transpose(1, 2).reshape(tensor.shape)
