"""Gated delta net (Yang et al. 2024, "Gated Delta Networks"), as Qwen3-Next and Qwen3.5 use it.

A linear recurrence with a state S [key_dim, value_dim] per head, in float32:

    S ← e^g S;  S ← S + k ⊗ β (v - kᵀS);  o = qᵀS

Decode runs one token at a time, and so do short chunks where kernels serve. Prefill runs in chunks:
each chunk solves a triangular system instead of stepping through its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.kernels import delta_net as kernels
from worker.kernels import gpu, library
from worker.layers.batch import Batch
from worker.layers.linear import LinearFactory
from worker.layers.norm import RMSNorm
from worker.layers.recurrent_cache import RecurrentCache
from worker.layers.rope import Rotation
from worker.layers.shard import Shard
from worker.layers.weights.quantised_tensor import Weight
from worker.layers.weights.slot import WeightSlot

CHUNK_LENGTH = 64  # tokens per triangular system
L2_EPS = 1e-6
LEAST = -40.0  # log of the smallest decay that counts


@dataclass(frozen=True)
class DeltaShape:
    """Value head h uses key head h // (value_heads / key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def part(self, shard: Shard) -> DeltaShape:
        """The heads of one rank; key heads are replicated where there are fewer of them than ranks.
        Raises Indivisible."""
        if shard.whole:
            return self
        values = shard.part(self.value_heads, self.value_heads, "recurrent value heads")
        keys = shard.part(self.key_heads, self.key_heads, "recurrent key heads", replicate=True)
        return replace(self, key_heads=_count(keys), value_heads=_count(values))

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v concatenated."""
        return 2 * self.keys + self.values


class GatedDeltaNet:
    """projections → causal convolution → recurrence → gated norm → out.

    `grouped`: the checkpoint interleaves q, k, v, z and b, a by key head (Qwen3-Next). Otherwise it
    has one tensor each for qkv, z, b and a.
    """

    def __init__(
        self,
        hidden: int,
        shape: DeltaShape,
        linears: LinearFactory,
        *,
        eps: float,
        grouped: bool,
    ) -> None:
        self._hidden, self._whole, self._grouped = hidden, shape, grouped
        self._shape, self._shard = shape.part(linears.shard), linears.shard
        self._dtype, self._device = linears.dtype, linears.device
        keys, values = shape.key_heads, shape.value_heads
        # q | k | v | z | b | a
        self._in = linears.column(
            hidden,
            *(shape.keys, shape.keys, shape.values, shape.values, values, values),
            heads=(keys, keys, values, values, values, values),
        )
        self._out = linears.row(shape.values, hidden, heads=values)
        self._norm = RMSNorm(shape.value_dim, eps, torch.float32, linears.device)
        own = self._shape
        self._conv = torch.empty(own.kernel, own.channels, device=linears.device)  # float32
        self._decay = torch.empty(own.value_heads, device=linears.device)  # -exp(A_log)
        self._dt_bias = torch.empty(own.value_heads, device=linears.device)

    def __call__(self, x: Tensor, rotate: Rotation, cache: RecurrentCache, batch: Batch) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]. `rotate` is not used."""
        shape = self._shape
        heads = shape.value_heads
        u, z, b, a = self._in(x).split((shape.channels, shape.values, heads, heads), dim=-1)
        g, beta = self._gates(a, b)
        single = batch.short or batch.decode
        if single is not None:
            cache.stored().require(slots=single.high, positions=single.longest)
        outputs = []
        done, chunks = 0, batch.chunks
        if batch.short is not None and self._serves(u):
            done, chunks = batch.short.size, chunks[batch.short.chunks :]
            outputs.append(self._step(u[:done], g[:done], beta[:done], cache, batch.short.slots))
        elif batch.decode is not None:
            done, slots = batch.decode.size, batch.decode.slots
            outputs.append(self._decode(u[:done], g[:done], beta[:done], cache, slots))
        for chunk in chunks:
            rows = slice(chunk.row, chunk.row + chunk.length)
            inputs = torch.cat([cache.inputs[chunk.slot], u[rows]])  # [kernel - 1 + length, C]
            cache.inputs[chunk.slot] = inputs[chunk.length :]
            q, k, v = self._split(convolve(inputs, self._conv).to(x.dtype))
            state = cache.state[chunk.slot]
            outputs.append(recur_in_chunks(q, k, v, g[rows], beta[rows], state))
        o = outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [tokens, heads, value_dim]
        return self._out(self._gated_norm(o, z))

    def _gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The logs of the decays, and the betas, of a and b [tokens, value_heads]: float32 [tokens,
        value_heads]."""
        if gpu.serves(a):
            computed: tuple[Tensor, Tensor] = gpu.delta_net().gates(
                a, b, self._decay, self._dt_bias
            )
            return computed
        return self._decay * F.softplus(a.float() + self._dt_bias), b.sigmoid().float()

    def _gated_norm(self, o: Tensor, z: Tensor) -> Tensor:
        """norm(o) · silu(z) for o [tokens, value_heads, value_dim] and z [tokens, values] →
        [tokens, values]."""
        if gpu.serves(z):
            computed: Tensor = gpu.delta_net().gated_norm(o, z, *self._norm.factors())
            return computed
        normed = self._norm(o.to(z.dtype).float()) * F.silu(z.float().view(o.shape))
        return normed.to(z.dtype).flatten(1)

    def _decode(
        self, u: Tensor, g: Tensor, beta: Tensor, cache: RecurrentCache, slots: Tensor
    ) -> Tensor:
        """One token for each of n sequences: u [n, channels], g and beta [n, value_heads] → [n,
        value_heads, value_dim]."""
        if self._serves(u) or gpu.serves(u):
            return self._step(u, g, beta, cache, slots)
        inputs = torch.cat([cache.inputs[slots], u[:, None]], dim=1)  # [n, kernel, channels]
        cache.inputs[slots] = inputs[:, 1:]
        q, k, v = self._split((inputs * self._conv).sum(1).to(u.dtype))
        state = cache.state[slots]
        output = recur(q, k, v, g, beta, state)
        cache.state[slots] = state
        return output

    def _serves(self, u: Tensor) -> bool:
        """True if the kernels of CPUs do: they compute rows of one sequence in their order."""
        return self._shape.key_dim <= kernels.MAX_KEY and library.serves(u)

    def _step(
        self, u: Tensor, g: Tensor, beta: Tensor, cache: RecurrentCache, slots: Tensor
    ) -> Tensor:
        """`_decode` by kernels. On CPUs rows may belong to one sequence."""
        own = kernels if self._serves(u) else gpu.delta_net()
        y = own.convolve(cache.inputs, slots, u, self._conv)
        output: Tensor = own.recur(cache.state, slots, y, g, beta, self._shape.key_heads)
        return output

    def _split(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolution output [n, C] before its activation → q, k [n, value_heads, key_dim] and
        v [n, value_heads, value_dim] in float32. q and k have unit length; q is scaled."""
        shape = self._shape
        q, k, v = F.silu(y).float().split((shape.keys, shape.keys, shape.values), dim=-1)
        repeats = shape.value_heads // shape.key_heads
        q = _unit(q.reshape(-1, shape.key_heads, shape.key_dim)) * shape.key_dim**-0.5
        k = _unit(k.reshape(-1, shape.key_heads, shape.key_dim))
        return (
            q.repeat_interleave(repeats, dim=1),
            k.repeat_interleave(repeats, dim=1),
            v.reshape(-1, shape.value_heads, shape.value_dim),
        )

    def make_cache(self) -> RecurrentCache:
        shape = self._shape
        return RecurrentCache(
            channels=shape.channels,
            kernel=shape.kernel,
            heads=shape.value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            dtype=self._dtype,
            device=self._device,
        )

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        shape = self._whole
        projections = self._grouped_map(prefix) if self._grouped else self._plain_map(prefix)
        return {
            **projections,
            f"{prefix}.conv1d.weight": WeightSlot(
                (shape.channels, 1, shape.kernel), self._load_conv
            ),
            f"{prefix}.A_log": WeightSlot((shape.value_heads,), self._load_decay),
            f"{prefix}.dt_bias": WeightSlot((shape.value_heads,), self._load_dt_bias),
            f"{prefix}.norm.weight": self._norm.weight_slot(),
            f"{prefix}.out_proj.weight": self._out.weight_slot(),
        }

    def _plain_map(self, prefix: str) -> dict[str, WeightSlot]:
        return {
            f"{prefix}.in_proj_qkv.weight": self._in.merged_slot(range(3)),
            f"{prefix}.in_proj_z.weight": self._in.weight_slot(3),
            f"{prefix}.in_proj_b.weight": self._in.weight_slot(4),
            f"{prefix}.in_proj_a.weight": self._in.weight_slot(5),
        }

    def _grouped_map(self, prefix: str) -> dict[str, WeightSlot]:
        """Rows are ordered by key head: q, k, then v and z of its value heads; likewise b and a."""
        shape, hidden = self._whole, self._hidden
        per_key = shape.value_heads // shape.key_heads
        values = per_key * shape.value_dim

        def load_qkvz(tensor: Weight) -> None:
            rows = torch.arange(tensor.shape[0]).view(shape.key_heads, -1)
            qkvz = rows.split((shape.key_dim, shape.key_dim, values, values), dim=1)
            for part, own in enumerate(qkvz):
                fill(tensor, part, own)

        def load_ba(tensor: Weight) -> None:
            rows = torch.arange(tensor.shape[0]).view(shape.key_heads, 2 * per_key)
            b, a = rows.split(per_key, dim=1)
            fill(tensor, 4, b)
            fill(tensor, 5, a)

        def fill(tensor: Weight, part: int, rows: Tensor) -> None:
            self._in.weight_slot(part).fill(tensor[rows.flatten().to(tensor.device)])

        rows = shape.channels + shape.values
        return {
            f"{prefix}.in_proj_qkvz.weight": WeightSlot(
                (rows, hidden), load_qkvz, load_quantised=load_qkvz
            ),
            f"{prefix}.in_proj_ba.weight": WeightSlot(
                (2 * shape.value_heads, hidden), load_ba, load_quantised=load_ba
            ),
        }

    def _load_conv(self, tensor: Tensor) -> None:
        shape = self._whole
        q, k, v = tensor[:, 0].split((shape.keys, shape.keys, shape.values))
        self._conv.copy_(torch.cat([self._keys(q), self._keys(k), self._values(v)]).T)

    def _load_decay(self, tensor: Tensor) -> None:
        self._decay.copy_(-self._values(tensor).float().exp())

    def _load_dt_bias(self, tensor: Tensor) -> None:
        self._dt_bias.copy_(self._values(tensor))

    def _keys(self, tensor: Tensor) -> Tensor:
        """The rows of this rank's key heads, of all [rows, ...]."""
        return tensor[
            self._shard.part(len(tensor), self._whole.key_heads, "key heads", replicate=True)
        ]

    def _values(self, tensor: Tensor) -> Tensor:
        """The rows of this rank's value heads, of all [rows, ...]."""
        return tensor[self._shard.part(len(tensor), self._whole.value_heads, "value heads")]


def _count(part: slice) -> int:
    return int(part.stop - part.start)


def convolve(inputs: Tensor, weights: Tensor) -> Tensor:
    """Causal convolution of each channel: inputs [kernel - 1 + length, channels], weights [kernel,
    channels] in float32 → float32 [length, channels]."""
    inputs = inputs.float()  # once: products of two dtypes are slow
    length = len(inputs) - len(weights) + 1
    mixed = inputs[:length] * weights[0]
    for j in range(1, len(weights)):
        mixed.addcmul_(inputs[j : j + length], weights[j])
    return mixed


def recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token for each of n sequences. Updates `state` [n, heads, key_dim, value_dim] in place.

    q, k [n, heads, key_dim], v [n, heads, value_dim], g, beta [n, heads] → [n, heads, value_dim].
    """
    state.mul_(g.exp()[..., None, None])
    predicted = torch.matmul(k[..., None, :], state)  # [n, heads, 1, value_dim]
    state.addcmul_(k[..., None], beta[..., None, None] * (v[..., None, :] - predicted))
    return torch.matmul(q[..., None, :], state)[..., 0, :]


def recur_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """Many tokens of one sequence. Updates `state` [heads, key_dim, value_dim] in place.

    q, k [length, heads, key_dim], v [length, heads, value_dim], g, beta [length, heads]
    → [length, heads, value_dim]. Equal to `recur` per token, up to rounding, if |k| ≤ 1.
    """
    length = len(q)
    size = min(CHUNK_LENGTH, length)
    padding = -length % size  # k = beta = g = 0: padding leaves the state unchanged

    def chunks(x: Tensor) -> Tensor:
        """[length, heads, ...] → [heads, chunks, size, ...]."""
        padded = F.pad(x, [0, 0] * (x.dim() - 1) + [0, padding])
        return padded.view(-1, size, *x.shape[1:]).movedim(2, 0)

    q, k, v, g, beta = chunks(q), chunks(k), chunks(v), chunks(g), chunks(beta)
    # [heads, chunks, size]: log decay since the chunk's start. Differences of large float32 sums
    # would lose the digits of small decays.
    sums = g.double().cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    # Masked before exp: above the diagonal the differences are positive and overflow.
    between = (sums[..., :, None] - sums[..., None, :]).float()
    between = _decays(between.masked_fill_(~lower, float("-inf")))
    since_start = _decays(sums[..., None].float())
    weighted = k * beta[..., None]
    overlaps = weighted @ k.mT
    # Reads what is below the diagonal, and takes the diagonal for 1.
    solve = partial(torch.linalg.solve_triangular, upper=False, unitriangular=True)
    fresh = solve(overlaps * between, v * beta[..., None])
    # Not solved with the decays, which would shrink later rows until they are denormal.
    stale = solve(overlaps, weighted) * since_start
    inner = q @ k.mT * between
    decayed_q = q * since_start
    ends = sums[..., -1:]  # [heads, chunks, 1]
    decayed_k = k * _decays((ends - sums)[..., None].float())
    whole = _decays(ends[..., None].float())
    outputs = []
    for index in range(q.shape[1]):
        corrected = fresh[:, index] - stale[:, index] @ state
        outputs.append(decayed_q[:, index] @ state + inner[:, index] @ corrected)
        state.mul_(whole[:, index])
        state.add_(decayed_k[:, index].mT @ corrected)
    return torch.cat(outputs, dim=1)[:, :length].transpose(0, 1)


def _decays(logs: Tensor) -> Tensor:
    """exp(logs) in place, 0 below LEAST: arithmetic with denormal numbers is slow."""
    return logs.masked_fill_(logs < LEAST, float("-inf")).exp_()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
