"""Self-attention with rotary positions and grouped query heads, as most families use it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels import gpu, library
from worker.kernels.elementwise import MAX_HEAD, prepare_queries_and_keys
from worker.layers.attention import attend
from worker.layers.batch import Batch
from worker.layers.kv_cache import KVCache
from worker.layers.linear import LinearFactory
from worker.layers.norm import MakeNorm, WholeNorm
from worker.layers.rope import Rotation
from worker.layers.shard import Shard
from worker.layers.weights.slot import Parameter, WeightSlot


@dataclass(frozen=True)
class HeadShape:
    """Query head h reads key-value head h // (heads / kv_heads)."""

    heads: int
    kv_heads: int
    dim: int

    def part(self, shard: Shard) -> HeadShape:
        """The heads of one rank; key-value heads are replicated where there are fewer of them than
        ranks. Raises Indivisible."""
        if shard.whole:
            return self
        shard.part(self.heads, self.heads, "attention heads")
        kv_heads = shard.part(self.kv_heads, self.kv_heads, "key-value heads", replicate=True)
        return HeadShape(self.heads // shard.ranks, kv_heads.stop - kv_heads.start, self.dim)


class SelfAttention:
    """out(softmax(scale · q kᵀ) v). With `norm`, queries and keys are normalised, per head or
    whole.

    `out_bias` defaults to `bias`, `scale` to dim^-0.5. `gated` (Qwen3-Next, Qwen3.5): the query
    projection holds, per head, the query followed by a gate; the head's output is multiplied by
    sigmoid(gate). `cap` limits scores to (-cap, cap) with tanh. Without `rotary`, positions have
    no effect (NoPE). `merged`: checkpoints have q, k and v in one tensor, `qkv_proj`. `sinks`
    (gpt-oss): a learned score per head takes part in the softmax and has no value.
    """

    def __init__(
        self,
        hidden: int,
        shape: HeadShape,
        linears: LinearFactory,
        *,
        bias: bool = False,
        out_bias: bool | None = None,
        norm: MakeNorm | None = None,
        norm_per_head: bool = True,
        scale: float | None = None,
        cap: float | None = None,
        gated: bool = False,
        rotary: bool = True,
        merged: bool = False,
        sinks: bool = False,
    ) -> None:
        self._shape, shard = shape.part(linears.shard), linears.shard
        self._bias, self._gated, self._merged = bias, gated, merged
        self._out_bias = bias if out_bias is None else out_bias
        self._cap, self._rotary = cap, rotary
        self._scale = shape.dim**-0.5 if scale is None else scale
        q, kv = shape.heads * shape.dim, shape.kv_heads * shape.dim
        self._qkv = linears.column(
            hidden,
            *(2 * q if gated else q, kv, kv),
            bias=bias,
            heads=(shape.heads, shape.kv_heads, shape.kv_heads),
        )
        self._out = linears.row(q, hidden, bias=self._out_bias, heads=shape.heads)
        self._sinks = None
        if sinks:
            part = None if shard.whole else shard.part(shape.heads, shape.heads, "heads")
            self._sinks = Parameter(
                shape.heads, dtype=torch.float32, device=linears.device, part=part
            )
        self._norms = (norm(shape.dim), norm(shape.dim)) if norm and norm_per_head else None
        self._whole_norms = (
            (WholeNorm(norm, q, shape.heads, shard), WholeNorm(norm, kv, shape.kv_heads, shard))
            if norm and not norm_per_head
            else None
        )

    def __call__(self, x: Tensor, rotate: Rotation, cache: KVCache, batch: Batch) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        shape = self._shape
        queries = shape.heads * (2 if self._gated else 1)
        heads = (queries, shape.kv_heads, shape.kv_heads)
        qkv = self._qkv(x).view(-1, sum(heads), shape.dim)
        q, k, v = qkv.split(heads, dim=1)  # [tokens, heads, dim] each
        if self._gated:
            q, gate = q.reshape(-1, shape.heads, 2 * shape.dim).chunk(2, dim=-1)
        q, k = self._prepare(q, k, rotate)
        sinks = None if self._sinks is None else self._sinks.value
        output = attend(q, k, v, cache, batch, self._scale, self._cap, sinks)
        if self._gated:
            output = output * gate.reshape(output.shape).sigmoid()
        return self._out(output)

    def _prepare(self, q: Tensor, k: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor]:
        """Norms and rotary positions of queries and keys."""
        norms = self._norms
        if self._whole_norms is not None:
            q_norm, k_norm = self._whole_norms
            q, k = q_norm(q.flatten(1)).view(q.shape), k_norm(k.flatten(1)).view(k.shape)
        rotation = rotate if self._rotary else None
        on_gpu = gpu.serves(q)
        if (norms or rotation) and self._shape.dim <= MAX_HEAD and (on_gpu or library.serves(q)):
            prepare = (
                gpu.elementwise().prepare_queries_and_keys if on_gpu else prepare_queries_and_keys
            )
            prepared: tuple[Tensor, Tensor] = prepare(
                q,
                k,
                (norms[0].factors(), norms[1].factors()) if norms else None,
                (rotation.cos, rotation.sin) if rotation else None,
            )
            return prepared
        if norms:
            q, k = norms[0](q), norms[1](k)
        return (rotation(q), rotation(k)) if rotation else (q, k)

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        if self._merged:
            return {
                f"{prefix}.qkv_proj.weight": self._qkv.merged_slot(),
                f"{prefix}.o_proj.weight": self._out.weight_slot(),
            }
        slots = {}
        projections = {
            "q_proj": (self._qkv, 0),
            "k_proj": (self._qkv, 1),
            "v_proj": (self._qkv, 2),
            "o_proj": (self._out, 0),
        }
        for name, (linear, part) in projections.items():
            slots[f"{prefix}.{name}.weight"] = linear.weight_slot(part)
            if self._out_bias if linear is self._out else self._bias:
                slots[f"{prefix}.{name}.bias"] = linear.bias_slot(part)
        if self._sinks is not None:
            slots[f"{prefix}.sinks"] = self._sinks.slot()
        for norms in (self._norms, self._whole_norms):
            if norms is not None:
                slots[f"{prefix}.q_norm.weight"] = norms[0].weight_slot()
                slots[f"{prefix}.k_norm.weight"] = norms[1].weight_slot()
        return slots
