"""The tensors of gated delta nets: from the order of llama.cpp to that of safetensors files.

Safetensors files order value heads by the key head that they share. Newer files for llama.cpp are
`tiled`: the first value head of every key head, then the second, and so on. Qwen3-Next's files are
not tiled; the oldest keep its projections grouped by key head (ssm_in, ssm_ba).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from worker.loading.gguf.pieces import Piece


@dataclass(frozen=True)
class DeltaNetRows:
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool

    @classmethod
    def of(cls, fields: dict[str, Any], tiled: bool) -> Self:
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        key_heads, value_heads, key_dim, value_dim = (fields[f"linear_{name}"] for name in names)
        return cls(key_heads, value_heads, key_dim, value_dim, tiled)

    def pieces(self, name: str, whole: Piece) -> dict[str, Piece] | None:
        """The tensors under `linear_attn` that are made from one of the file; None if it belongs to
        another part of the layer, or has the wrong shape."""
        part = name.split(".", 2)[2]
        if part in ("ssm_in.weight", "ssm_ba.weight"):
            return self._grouped(part, whole)
        heads, rows, both = self._heads(), self._value_rows(), self._qkv_rows()
        orders = {
            "attn_qkv.weight": ("in_proj_qkv.weight", both),
            "attn_gate.weight": ("in_proj_z.weight", rows),
            "ssm_beta.weight": ("in_proj_b.weight", heads),
            "ssm_alpha.weight": ("in_proj_a.weight", heads),
            "ssm_dt.bias": ("dt_bias", heads),
            "ssm_a": ("A_log", heads),
            "ssm_conv1d.weight": ("conv1d.weight", both),
        }
        if part == "ssm_out.weight":
            columns = self._value_rows()
            if not self.tiled or whole.shape[-1] != len(columns):
                return {"out_proj.weight": whole}
            return {"out_proj.weight": whole.changed(lambda values: values[:, columns])}
        if part == "ssm_norm.weight":
            return {"norm.weight": whole}
        if part not in orders:
            return None
        ours, order = orders[part]
        piece = whole
        if self.tiled and whole.shape[0] == len(order):
            piece = whole.with_rows(order)
        if part == "ssm_a":
            piece = piece.changed(lambda values: (-values).log())
        if part == "ssm_conv1d.weight" and len(whole.shape) == 2:
            piece = piece.changed(
                lambda values: values[:, None], (whole.shape[0], 1, whole.shape[1])
            )
        return {ours: piece}

    def _heads(self) -> Tensor:
        """The place in the file of each value head."""
        heads = torch.arange(self.value_heads)
        return heads.view(-1, self.key_heads).T.flatten() if self.tiled else heads

    def _value_rows(self) -> Tensor:
        """The rows of the value heads, in their order in safetensors files."""
        return (self._heads()[:, None] * self.value_dim + torch.arange(self.value_dim)).flatten()

    def _qkv_rows(self) -> Tensor:
        keys = 2 * self.key_heads * self.key_dim
        return torch.cat([torch.arange(keys), keys + self._value_rows()])

    def _grouped(self, part: str, whole: Piece) -> dict[str, Piece] | None:
        """Rows by key head: q, k, then v and z of its value heads; likewise b and a."""
        shared = self.value_heads // self.key_heads
        sizes = [self.key_dim, self.key_dim, shared * self.value_dim, shared * self.value_dim]
        if part == "ssm_ba.weight":
            sizes = [shared, shared]
        if whole.shape[0] != self.key_heads * sum(sizes):
            return None
        rows = torch.arange(whole.shape[0]).view(self.key_heads, -1)
        split = [group.flatten() for group in rows.split(sizes, dim=1)]
        if part == "ssm_ba.weight":
            b, a = split
            return {
                "in_proj_b.weight": whole.with_rows(b),
                "in_proj_a.weight": whole.with_rows(a),
            }
        *qkv, z = split
        return {
            "in_proj_qkv.weight": whole.with_rows(torch.cat(qkv)),
            "in_proj_z.weight": whole.with_rows(z),
        }
