"""The rows of a gated delta net's tensors: their order in GGUF files and in safetensors files.

Safetensors files order value heads by the key head that they share. Newer files for llama.cpp are
`tiled`: the first value head of every key head, then the second, and so on. Qwen3-Next's files are
not tiled; the oldest keep its projections grouped by key head (ssm_in, ssm_ba).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeltaNetRows:
    """The heads of a delta net. All orders are int64 tensors of row numbers."""

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
