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
        values = self.value_heads * self.value_dim
        both = 2 * self.key_heads * self.key_dim + values
        names = {
            "attn_qkv.weight": ("in_proj_qkv.weight", both, self.qkv_rows),
            "attn_gate.weight": ("in_proj_z.weight", values, self.value_rows),
            "ssm_beta.weight": ("in_proj_b.weight", self.value_heads, self.heads),
            "ssm_alpha.weight": ("in_proj_a.weight", self.value_heads, self.heads),
            "ssm_dt.bias": ("dt_bias", self.value_heads, self.heads),
            "ssm_a": ("A_log", self.value_heads, self.heads),
            "ssm_conv1d.weight": ("conv1d.weight", both, self.qkv_rows),
        }
        if part == "ssm_norm.weight":
            return {"norm.weight": whole}
        if part == "ssm_out.weight":
            if not self.tiled or whole.shape[-1] != values:
                return {"out_proj.weight": whole}
            columns = self.value_rows()
            return {"out_proj.weight": whole.changed(lambda weight: weight[:, columns])}
        if part not in names:
            return None
        ours, rows, order = names[part]
        # Rows of another number are reported with the shapes.
        piece = whole.with_rows(order()) if self.tiled and whole.shape[0] == rows else whole
        if part == "ssm_a":
            piece = piece.changed(lambda decays: (-decays).log())
        if part == "ssm_conv1d.weight" and len(whole.shape) == 2:
            channels, kernel = whole.shape
            piece = piece.changed(lambda weight: weight[:, None], (channels, 1, kernel))
        return {ours: piece}

    def heads(self) -> Tensor:
        """The place in the file of each value head."""
        heads = torch.arange(self.value_heads)
        return heads.view(-1, self.key_heads).T.flatten() if self.tiled else heads

    def value_rows(self) -> Tensor:
        """The rows of the value heads, in their order in safetensors files."""
        return (self.heads()[:, None] * self.value_dim + torch.arange(self.value_dim)).flatten()

    def qkv_rows(self) -> Tensor:
        keys = 2 * self.key_heads * self.key_dim
        return torch.cat([torch.arange(keys), keys + self.value_rows()])

    def grouped_rows(self, part: str) -> tuple[Tensor, Tensor]:
        """The rows of a projection that is grouped by key head: those of q, k and v, and those of
        z; for `part` "ba", those of b and those of a."""
        shared = self.value_heads // self.key_heads
        sizes = [self.key_dim, self.key_dim, shared * self.value_dim, shared * self.value_dim]
        if part == "ba":
            sizes = [shared, shared]
        rows = torch.arange(self.key_heads * sum(sizes)).view(self.key_heads, -1)
        *first, last = (group.flatten() for group in rows.split(sizes, dim=1))
        return torch.cat(first), last

    def _grouped(self, part: str, whole: Piece) -> dict[str, Piece] | None:
        if self.value_heads < self.key_heads:
            return None
        names = ("in_proj_qkv", "in_proj_z")
        if part == "ssm_ba.weight":
            names = ("in_proj_b", "in_proj_a")
        rows = self.grouped_rows("ba" if part == "ssm_ba.weight" else "qkvz")
        if whole.shape[0] != sum(map(len, rows)):
            return None
        return {
            f"{name}.weight": whole.with_rows(order)
            for name, order in zip(names, rows, strict=True)
        }
