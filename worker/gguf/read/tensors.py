"""Presents the tensors of a GGUF file under the names, shapes and values that safetensors files of
the same model have.

Undoes what the converter of llama.cpp does: queries and keys in pairs of neighbours, norms stored
as 1 + w, experts stacked in one tensor, projections and heads of delta nets in another order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from gguf.tensor_mapping import get_tensor_name_map
from torch import Tensor

from jobs.errors import JobError
from worker.gguf.architectures import Architecture
from worker.gguf.delta_net import DeltaNetRows
from worker.gguf.read.delta_net import delta_net_views
from worker.gguf.read.header import StoredTensor, Tensors
from worker.gguf.read.tensor_views import TensorView
from worker.gguf.tensor_format import FACTORS
from worker.models.config_fields import LINEAR, MAX_EXPERTS

# Names in safetensors files that the families use: the `gguf` package maps them to those in the
# file.
MODEL_NAMES = ("model.embed_tokens", "model.norm", "lm_head")
LAYER_NAMES = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    "mlp.gate",
    *(f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")),
    *(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")),
    "mlp.shared_expert_gate",
    *(f"linear_attn.{part}" for part in ("A_log", "conv1d", "norm", "out_proj")),
    *(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a", "ba", "qkvz")),
)
# Names that take precedence: where a family merges tensors, or names them differently.
MERGED = ("self_attn.qkv_proj", "mlp.gate_up_proj")
OWN_NAMES = {
    "phi3": MERGED,
    "glm4": (*MERGED, "post_self_attn_layernorm", "post_mlp_layernorm"),
    "mixtral": ("block_sparse_moe.gate",),
    "gpt_oss": ("mlp.router", "self_attn.sinks"),
}
LAYER = re.compile(r"blk\.(\d+)\.")
SUFFIX = re.compile(r"\.(weight|bias)$")
EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
EXPERT = re.compile(r"model\.layers\.(\d+)\.(.+\.experts)\.\d+\.(\w+)\.(weight|bias)")
WITHOUT_SUFFIX = ("sinks",)  # names of tensors in safetensors files
FUSED = re.compile(r"(blk\.(\d+)\.attn_qkv)\.(weight|bias)")
# The prefix of a layer's experts and the names of their projections.
EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe.experts", {"gate": "w1", "down": "w2", "up": "w3"}),
}
DEFAULT_NAMES = ("mlp.experts", {part: f"{part}_proj" for part in ("gate", "up", "down")})


class TensorMap:
    """The tensors of one model. `fields` are those of its config.json."""

    def __init__(
        self, architecture: Architecture, fields: dict[str, Any], tensors: Tensors
    ) -> None:
        self._architecture, self._fields, self._tensors = architecture, fields, tensors
        self._layers: int = fields["num_hidden_layers"]
        self._names = _names_of(architecture, fields["model_type"], self._layers)
        self._files = {ours: theirs for theirs, ours in self._names.items()}
        kinds = fields.get("layer_types") or []
        self._linear = {index for index, kind in enumerate(kinds) if kind == LINEAR}
        self._delta = DeltaNetRows.of(fields, architecture.tiled) if self._linear else None

    def views(self) -> dict[str, TensorView]:
        """The model's tensors by name. A tensor that no family has keeps its name."""
        found: dict[str, TensorView] = {}
        for stored in self._tensors.values():
            for name, view in self._of(stored):
                if name in found:
                    both = f"{found[name].stored.name} and {stored.name}"
                    raise JobError(
                        "unsupported_model",
                        f"{stored.file} has {name} twice: as {both}; download the model again",
                    )
                found[name] = view
        return found

    def label(self, name: str) -> str:
        """The name in the file of a tensor of the model."""
        expert = EXPERT.fullmatch(name)
        if expert is not None:
            parts = {ours: part for part, ours in self._expert_names[1].items()}
            return f"blk.{expert[1]}.ffn_{parts.get(expert[3], expert[3])}_exps.{expert[4]}"
        suffix = SUFFIX.search(name)
        base = name[: suffix.start()] if suffix else name
        return self._files[base] + (suffix[0] if suffix else "") if base in self._files else name

    @property
    def _expert_names(self) -> tuple[str, dict[str, str]]:
        return EXPERT_NAMES.get(self._fields["model_type"], DEFAULT_NAMES)

    def _of(self, stored: StoredTensor) -> Iterator[tuple[str, TensorView]]:
        layer = LAYER.match(stored.name)
        index = int(layer[1]) if layer else None
        if stored.name in FACTORS or (index is not None and index >= self._layers):
            return  # read with the configuration, or of multi-token prediction
        whole = TensorView.whole(stored)
        expert = EXPERTS.fullmatch(stored.name)
        stacked = stored.shape[0] <= MAX_EXPERTS
        if expert and stacked and len(stored.shape) == (3 if expert[3] == "weight" else 2):
            yield from self._experts(whole, int(expert[1]), expert[2], expert[3])
            return
        if index in self._linear and self._delta is not None:
            found = delta_net_views(self._delta, stored.name, whole)
            if found is not None:
                yield from ((f"model.layers.{index}.linear_attn.{n}", p) for n, p in found.items())
                return
        fused = FUSED.fullmatch(stored.name)
        if fused is not None and self._fields["model_type"] != "phi3":
            yield from self._fused(whole, int(fused[2]), fused[3])
            return
        yield self._plain(whole)

    def _plain(self, view: TensorView) -> tuple[str, TensorView]:
        name = view.stored.name
        suffix = SUFFIX.search(name)
        base = name[: suffix.start()] if suffix else name
        if suffix is None or base not in self._names:
            return name, view
        ours = self._names[base]
        part = ours.rpartition(".")[2]
        if self._architecture.zero_centred and part.endswith("norm"):
            view = view.changed(lambda values: values - 1)
        elif self._architecture.permuted and part in ("q_proj", "k_proj"):
            if view.shape[0] == self._rows(part) and self._fields["head_dim"] % 2 == 0:
                view = view.with_rows(self._halves(part))
        elif part == "shared_expert_gate" and len(view.shape) == 1:
            view = view.changed(lambda values: values[None], (1, *view.shape))
        return (ours if part in WITHOUT_SUFFIX else ours + suffix[0]), view

    def _halves(self, part: str) -> Tensor:
        """The order of rows that puts the channels of each head that rotate together half a head
        apart: [0, 2, 4, …, 1, 3, 5, …]."""
        dim = self._fields["head_dim"]
        heads = torch.arange(self._rows(part)).view(-1, dim // 2, 2)  # [heads, pairs, 2]
        return heads.transpose(1, 2).flatten()

    def _rows(self, part: str) -> int:
        heads = "num_attention_heads" if part == "q_proj" else "num_key_value_heads"
        rows: int = self._fields[heads] * self._fields["head_dim"]
        return rows

    def _experts(
        self, whole: TensorView, layer: int, part: str, suffix: str
    ) -> Iterator[tuple[str, TensorView]]:
        """One tensor for each expert and projection, of [experts, rows, columns] or, for biases,
        [experts, rows]."""
        prefix, parts = self._expert_names
        for index in range(whole.shape[0]):
            name = f"model.layers.{layer}.{prefix}.{index}"
            matrix = whole.one_matrix(index)
            if part != "gate_up":
                yield f"{name}.{parts[part]}.{suffix}", matrix
                continue
            half = matrix.shape[0] // 2
            yield f"{name}.{parts['gate']}.{suffix}", matrix.with_rows(slice(None, half))
            yield f"{name}.{parts['up']}.{suffix}", matrix.with_rows(slice(half, None))

    def _fused(
        self, whole: TensorView, layer: int, suffix: str
    ) -> Iterator[tuple[str, TensorView]]:
        """Queries, keys and values that are stored in one tensor."""
        queries, values = self._rows("q_proj"), self._rows("v_proj")
        if whole.shape[0] != queries + 2 * values or self._fields["head_dim"] % 2:
            yield whole.stored.name, whole
            return
        start = 0
        for part, count in (("q_proj", queries), ("k_proj", values), ("v_proj", values)):
            rows: slice | Tensor = slice(start, start + count)
            if self._architecture.permuted and part != "v_proj":
                rows = start + self._halves(part)
            yield f"model.layers.{layer}.self_attn.{part}.{suffix}", whole.with_rows(rows)
            start += count


def _names_of(architecture: Architecture, model_type: str, layers: int) -> dict[str, str]:
    """The base of a name in the file → the base in safetensors files, without `.weight` or `.bias`.
    `blk.0.attn_q` → `model.layers.0.self_attn.q_proj`."""
    known = get_tensor_name_map(architecture.number, layers)
    per_layer = (*OWN_NAMES.get(model_type, ()), *LAYER_NAMES)
    bases = [
        *MODEL_NAMES,
        *(f"model.layers.{i}.{part}" for i in range(layers) for part in per_layer),
    ]
    found: dict[str, str] = {}
    for base in bases:
        name = known.get_name(base)
        if name is not None:
            found.setdefault(name, base)
    return found
