"""The transforms of a model's tensors for a GGUF file: rows in another order, norms with an offset,
delta nets in llama.cpp's layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from worker.gguf.delta_net import DeltaNetRows
from worker.gguf.write.description import Description
from worker.layers.self_attention import HeadShape

QUERY_OR_KEY = re.compile(r".+\.self_attn\.([qk])_proj\.(weight|bias)")
DELTA_NET = re.compile(r"(.+\.linear_attn\.)(.+)")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A tensor of the file that is made from one of the model. `name` is the one for which `gguf`
    knows the name in the file."""

    name: str
    shape: Shape
    transform: Callable[[Tensor], Tensor] = lambda tensor: tensor


def parts_of(name: str, shape: Shape, description: Description) -> list[Part]:
    """The tensors of the file that one tensor of the model becomes."""
    architecture, delta = description.architecture, description.delta
    net, rows = DELTA_NET.fullmatch(name), QUERY_OR_KEY.fullmatch(name)
    if net and delta is not None:
        return [
            Part(net[1] + part.name, part.shape, part.transform)
            for part in _delta_parts(net[2], shape, delta)
        ]
    if rows and architecture.permuted:
        attention = description.attention
        return [Part(name, shape, lambda tensor: _in_pairs(tensor, attention, rows[1]))]
    if name.endswith("norm.weight") and architecture.zero_centred:
        return [Part(name, shape, lambda tensor: tensor.float() + 1)]
    if name.endswith(".shared_expert_gate.weight"):
        return [Part(name, shape[1:], lambda tensor: tensor[0])]
    if name.endswith(".sinks"):
        return [Part(f"{name}.weight", shape)]
    return [Part(name, shape)]


def _in_pairs(tensor: Tensor, shape: HeadShape, which: str) -> Tensor:
    """Rows of each head: channels i and i + dim / 2, which rotate together, become neighbours."""
    heads = shape.heads if which == "q" else shape.kv_heads
    halves: Tensor = tensor.unflatten(0, (heads, 2, shape.dim // 2))
    return halves.transpose(1, 2).reshape(tensor.shape)


def _delta_parts(name: str, shape: Shape, rows: DeltaNetRows) -> list[Part]:
    """The tensors of a delta net, see `worker/gguf/delta_net.py`."""
    if name == "in_proj_qkvz.weight":
        qkv, z = rows.grouped_rows("qkvz")
        return [
            Part("in_proj_qkv.weight", (len(qkv), shape[1]), lambda tensor: tensor[qkv]),
            Part("in_proj_z.weight", (len(z), shape[1]), lambda tensor: tensor[z]),
        ]
    if name == "in_proj_ba.weight":
        return [Part(name, shape)]
    heads, values, qkv = (
        order.argsort() for order in (rows.heads(), rows.value_rows(), rows.qkv_rows())
    )
    if name == "A_log":
        return [Part(name, shape, lambda tensor: -tensor.float().exp()[heads])]
    if name == "dt_bias":
        return [Part("dt_proj.bias", shape, lambda tensor: tensor[heads])]
    if name == "conv1d.weight":
        return [Part(name, (shape[0], shape[2]), lambda tensor: tensor[qkv, 0])]
    if name == "out_proj.weight":
        return [Part(name, shape, lambda tensor: tensor[:, values])]
    orders = {
        "in_proj_qkv.weight": qkv,
        "in_proj_z.weight": values,
        "in_proj_b.weight": heads,
        "in_proj_a.weight": heads,
    }
    if name in orders:
        return [Part(name, shape, lambda tensor: tensor[orders[name]])]
    return [Part(name, shape)]
