"""Rotary position embeddings (Su et al. 2021), rotate-half layout, and scaled variants.

The variants and the precedence of config fields are those of transformers' `modeling_rope_utils`:
linear (kaiokendev), dynamic NTK, yarn (Peng et al. 2023), llama3 (Llama 3.1 model card), longrope
(Ding et al. 2024). Where frequencies depend on the sequence's length (dynamic, longrope), the
length of the prompt fixes them, so that cached keys stay valid.

Frequencies are bit-identical to transformers': the same operations in the same order. A difference
in the last bit grows to a visible angle after thousands of positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LEAST_ROWS = 1024  # of a table
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """The parameters of one kind of rotary embedding."""

    head_dim: int
    max_positions: int  # max_position_embeddings
    theta: float = 10_000.0
    partial: float = 1.0  # fraction of head_dim that is rotated
    kind: str = "default"
    original_positions: int = 0  # original_max_position_embeddings; 0: max_positions
    scaling: Mapping[str, Any] = field(default_factory=dict)  # fields of the variant

    @property
    def dim(self) -> int:
        """Number of rotated channels."""
        return int(self.head_dim * self.partial)

    @property
    def context(self) -> int:
        """Maximum length of a sequence in tokens, by vLLM's rule: linear and dynamic stretch
        max_position_embeddings, yarn stretches the original positions. max_position_embeddings of
        llama3 and longrope is stretched already."""
        factor = self.scaling.get("factor")
        if factor and self.kind in ("linear", "dynamic"):
            return int(self.max_positions * factor)
        if factor and self.kind == "yarn":
            return int(self.original * factor)
        return self.max_positions

    @property
    def stretched(self) -> bool:
        """True if the config stretches the context beyond the positions of the pretraining."""
        return self.kind != "default"

    @property
    def original(self) -> int:
        return self.original_positions or self.max_positions


@dataclass(frozen=True)
class Rotation:
    """cos and signed sin for the tokens of one step: [tokens, 1, dim], in the model's dtype."""

    cos: Tensor
    sin: Tensor  # [-sin, sin], multiplied with x rolled by half

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, heads, head_dim] → the same, its first `dim` channels rotated."""
        dim = self.cos.shape[-1]
        if dim == x.shape[-1]:
            return torch.addcmul(x * self.cos, x.roll(dim // 2, dims=-1), self.sin)
        rotary, rest = x[..., :dim], x[..., dim:]
        rotated = torch.addcmul(rotary * self.cos, rotary.roll(dim // 2, dims=-1), self.sin)
        return torch.cat([rotated, rest], dim=-1)


class Rope:
    """Rotations of positions, with the frequencies of one kind of layer: rows of a table, or
    computed where they depend on the length of the prompt."""

    def __init__(self, config: RopeConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype = config, dtype
        self.stretched = config.stretched
        exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
        wavelengths = config.theta**exponents  # [dim / 2], divided by 2 pi
        plain = 1.0 / wavelengths
        self._factor = 1.0  # of cos and sin
        self._long: Tensor | None = None
        scaling = config.scaling
        if config.kind == "linear":
            plain = plain / scaling["factor"]
        elif config.kind == "llama3":
            plain = _llama3(plain, config)
        elif config.kind == "yarn":
            plain, self._factor = _yarn(wavelengths, config)
        elif config.kind == "longrope":
            self._long = (1.0 / (torch.tensor(scaling["long_factor"]) * wavelengths)).to(device)
            plain = 1.0 / (torch.tensor(scaling["short_factor"]) * wavelengths)
            self._factor = longrope_factor(config)
        self._exponents = exponents.to(device)
        self._frequencies = plain.to(device)
        self._by_position = self._long is None and config.kind != "dynamic"
        self._table: Rotation | None = None  # of the first positions

    def __call__(self, positions: Tensor, prompt_lengths: Tensor) -> Rotation:
        """positions and prompt_lengths [tokens] → the rotation of these tokens. The positions are
        below what `reserve` returned last."""
        if self._table is None:
            return self._compute(positions, prompt_lengths)
        table = self._table
        return Rotation(table.cos.index_select(0, positions), table.sin.index_select(0, positions))

    def reserve(self, positions: int) -> int:
        """Make a table of at least that many positions, if the prompt does not matter. Returns how
        many it has."""
        known = 0 if self._table is None else len(self._table.cos)
        if known < positions and self._by_position:
            known = max(positions, 2 * known, LEAST_ROWS)
            every = torch.arange(known, device=self._frequencies.device)
            self._table = self._compute(every, every)
        return known

    def _compute(self, positions: Tensor, prompt_lengths: Tensor) -> Rotation:
        angles = positions[:, None].float() * self._frequencies_for(prompt_lengths)
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return Rotation(
            torch.cat([cos, cos], dim=-1).to(self._dtype)[:, None],
            torch.cat([-sin, sin], dim=-1).to(self._dtype)[:, None],
        )

    def variant(self, prompt_length: int) -> int:
        """Equal for prompt lengths whose tokens are rotated equally."""
        if self._long is not None:
            return int(prompt_length > self._config.original)
        if self._config.kind == "dynamic":
            return max(prompt_length, self._config.max_positions)
        return 0

    def _frequencies_for(self, prompt_lengths: Tensor) -> Tensor:
        """[1 or tokens, dim / 2], radians per position."""
        config = self._config
        if self._long is not None:
            beyond = prompt_lengths[:, None] > config.original
            return torch.where(beyond, self._long, self._frequencies)
        if config.kind == "dynamic":
            factor = config.scaling["factor"]
            length = prompt_lengths[:, None].clamp(min=config.max_positions).float()
            stretch = factor * length / config.max_positions - (factor - 1)
            base = config.theta * stretch ** (config.dim / (config.dim - 2))
            return 1.0 / torch.pow(base, self._exponents)
        return self._frequencies[None, :]


def _llama3(plain: Tensor, config: RopeConfig) -> Tensor:
    scaling = config.scaling
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = config.original / (2 * math.pi / plain)  # full turns within the original context
    keep = (turns - low) / (high - low)
    stretched = plain / scaling["factor"]
    between = (1 - keep) * plain / scaling["factor"] + keep * plain
    return torch.where(keep < 0, stretched, torch.where(keep > 1, plain, between))


def _yarn(wavelengths: Tensor, config: RopeConfig) -> tuple[Tensor, float]:
    scaling, dim = config.scaling, config.dim
    factor = scaling.get("factor") or config.max_positions / config.original

    def channel(turns: float) -> float:
        """The channel that makes `turns` full turns within the original context."""
        positions = config.original / (turns * 2 * math.pi)
        return dim * math.log(positions) / (2 * math.log(config.theta))

    low = channel(scaling.get("beta_fast") or 32.0)
    high = channel(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and mscale_all:
            attention = _mscale(factor, mscale) / _mscale(factor, mscale_all)
        else:
            attention = _mscale(factor, 1.0)
    keep = 1 - ramp
    return 1.0 / (factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep, attention


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def longrope_factor(config: RopeConfig) -> float:
    """The factor of cos and sin."""
    given = config.scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor = config.scaling.get("factor") or config.max_positions / config.original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(config.original))
