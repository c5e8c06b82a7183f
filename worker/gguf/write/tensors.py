"""The tensors of a GGUF file, made from those of a checkpoint: other names, the experts of a layer
stacked, other values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from gguf import get_tensor_name_map
from torch import Tensor

from jobs.errors import JobError
from worker.gguf.write.description import Description
from worker.gguf.write.transforms import Part, parts_of

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the file. `read` computes its values from the model's tensors `sources`."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    sources: list[str] = field(default_factory=list)


def output_tensors(
    description: Description,
    layers: int,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
) -> list[OutputTensor]:
    """The tensors of the file. `shapes` are those of the model's tensors by name; `read` returns
    the values of one of them."""
    names = get_tensor_name_map(description.architecture.number, layers)
    # Name in the file → one tensor of the model and its part, or those of all experts.
    stacks: dict[str, list[tuple[str, Part]]] = {}
    for name, shape in shapes.items():
        for part in parts_of(name, shape, description):
            match = EXPERT.fullmatch(part.name)
            whole = f"{match[1]}.{match[3]}" if match else part.name
            stored = names.get_name(whole, try_suffixes=(".weight", ".bias"))
            if stored is None:
                raise JobError("unsupported_model", f"tensor {name} has no name in GGUF files")
            stacks.setdefault(stored, []).append((name, part))
    return [
        *(_output(stored, parts, read) for stored, parts in stacks.items()),
        *(_constant(name, factors) for name, factors in description.rope_tensors.items()),
    ]


def _constant(name: str, values: Tensor) -> OutputTensor:
    return OutputTensor(name, tuple(values.shape), lambda: values)


def _output(
    stored: str, parts: list[tuple[str, Part]], read: Callable[[str], Tensor]
) -> OutputTensor:
    sources, (name, part) = [name for name, _ in parts], parts[0]
    if not EXPERT.fullmatch(part.name):
        return OutputTensor(stored, part.shape, lambda: part.transform(read(name)), sources)
    # In the order of the experts, which the names of the parts end with.
    return OutputTensor(
        stored,
        (len(parts), *part.shape),
        lambda: torch.stack([one.transform(read(name)) for name, one in parts]),
        sources,
    )
