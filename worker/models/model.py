"""The model interface that the engine uses, and the decoder that all families share.

A family file reads its config and builds its layers. `Decoder` owns the embedding, final norm and
head around them, the order of execution, and the checkpoint names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.layers.batch import Batch
from worker.layers.cache import LayerCache
from worker.layers.embedding import Embedding, Head, argmax
from worker.layers.graphs import Graphs
from worker.layers.kv_cache import FullKVCache, WindowKVCache
from worker.layers.linear import LinearFactory
from worker.layers.norm import MakeNorm, Norm, RMSNorm, ZeroCentredRMSNorm
from worker.layers.replay import Inputs, Replay
from worker.layers.rope import Rope, Rotation
from worker.layers.self_attention import HeadShape
from worker.layers.shard import WHOLE, Shard
from worker.layers.weights.quantised_tensor import Compress
from worker.layers.weights.slot import WeightSlot
from worker.models.config_fields import Fields


@dataclass(frozen=True)
class Placement:
    """Dtype and device of a model's weights, and factories for the layers that depend on them.
    `compress` is applied to the matrices of linears and the embedding. `built_for`: the device
    whose layouts the weights have, if `device` only stands in for it. `keep_quantised`: as of
    `LinearFactory`. `shard`: the part of the model that is made."""

    dtype: torch.dtype
    device: torch.device
    compress: Compress | None = None
    built_for: torch.device | None = None
    keep_quantised: bool = False
    shard: Shard = WHOLE

    @property
    def linears(self) -> LinearFactory:
        return LinearFactory(
            self.dtype,
            self.device,
            self.compress,
            self.built_for,
            self.keep_quantised,
            self.shard,
        )

    def norm(self, eps: float) -> MakeNorm:
        """Factory of plain norms."""
        return lambda size: RMSNorm(size, eps, self.dtype, self.device)

    def zero_centred_norm(self, eps: float) -> MakeNorm:
        """Factory of norms with weight 1 + w."""
        return lambda size: ZeroCentredRMSNorm(size, eps, self.device)

    def kv_cache(self, shape: HeadShape, window: int | None = None) -> LayerCache:
        shape = shape.part(self.shard)
        if window is None:
            return FullKVCache(shape.kv_heads, shape.dim, self.dtype, self.device)
        return WindowKVCache(shape.kv_heads, shape.dim, window, self.dtype, self.device)


class Model(Protocol):
    """A decoder: tokens in, logits out. Its state is in the caches that `make_caches` returns."""

    vocab_size: int  # rows of the head
    context_length: int  # longest supported sequence
    stretched: bool  # the config stretches its RoPE, which fixes context_length

    def __call__(self, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        """One forward pass. `caches` come from `make_caches`. Returns logits [batch.logits_rows,
        vocab_size], in float32 or the model's dtype. The next call may overwrite them."""

    def draft_tokens(
        self, batch: Batch, caches: Sequence[LayerCache], count: int, vocab_size: int
    ) -> list[tuple[Tensor, Tensor]]:
        """The most likely tokens after each sequence of a small batch with one row of logits each:
        `count` times their logits, as float32, and their ids below `vocab_size`, [sequences]. All
        but the last are computed as well; for `caches` that hold every position. The next call
        overwrites what this one returned."""

    def make_caches(self) -> list[LayerCache]:
        """A new, empty cache for each layer."""

    def forget_steps(self) -> None:
        """Drop what was recorded of steps, with the memory and the caches that it refers to."""

    def rotation(self, prompt_length: int) -> tuple[int, ...]:
        """Equal for prompt lengths whose tokens are rotated equally, so that one prompt may begin
        with the state of another."""

    def weight_map(self) -> Mapping[str, WeightSlot]:
        """Slots by checkpoint name, without wrapper prefixes (`model.…`, `lm_head.…`)."""


@dataclass(frozen=True)
class Family:
    """A model architecture: how to build it, and its defaults that are read outside its file."""

    build: Callable[[Fields, bool, Placement], Model]
    tie_word_embeddings: bool = False  # where config.json omits the field

    def __call__(self, fields: Fields, tied: bool, place: Placement) -> Model:
        """A model with empty weights. `tied`: the head uses the embedding's weight. Raises
        JobError("unsupported_model")."""
        return self.build(fields, tied, place)


class Layer(Protocol):
    """One layer of a decoder, with its RoPE and its kind of cache: first tokens of a sequence are
    mixed, then each is computed for itself."""

    @property
    def rope(self) -> Rope: ...

    def mix(self, x: Tensor, rotate: Rotation, cache: Any, batch: Batch) -> Tensor:
        """The mixer's output for x [tokens, hidden] → [tokens, hidden]; `rotate` is `rope`'s
        rotation for this batch."""

    def feed_forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output for its input x [tokens, hidden] and the mixer's output: [tokens,
        hidden], each row of the same rows."""

    def make_cache(self) -> LayerCache: ...

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]: ...


class Mixer(Protocol):
    """The part of a layer that mixes tokens of a sequence: attention or a recurrence."""

    def __call__(self, x: Tensor, rotate: Rotation, cache: Any, batch: Batch) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]: ...


class FeedForward(Protocol):
    """The part of a layer that acts on each token: an MLP or a mixture of experts."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]: ...


@dataclass(frozen=True)
class PreNormLayer:
    """x += mixer(norm(x)); x += mlp(norm(x))."""

    input_norm: Norm
    mixer: Mixer
    post_norm: Norm
    mlp: FeedForward
    rope: Rope
    make_cache: Callable[[], LayerCache]
    mixer_name: str = "self_attn"

    def mix(self, x: Tensor, rotate: Rotation, cache: Any, batch: Batch) -> Tensor:
        return self.mixer(self.input_norm(x), rotate, cache, batch)

    def feed_forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        x, normed = self.post_norm.after_add(x, mixed)
        return x + self.mlp(normed)

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        return {
            f"{prefix}.input_layernorm.weight": self.input_norm.weight_slot(),
            f"{prefix}.post_attention_layernorm.weight": self.post_norm.weight_slot(),
            **self.mixer.weight_map(f"{prefix}.{self.mixer_name}"),
            **self.mlp.weight_map(f"{prefix}.mlp"),
        }


class Decoder:
    """embedding → layers → norm → head.

    `embed_scale`, rounded to the model's dtype, multiplies the embeddings. `logit_cap` limits the
    logits to (-cap, cap) with tanh. Gemma uses both. Granite divides the logits by `logit_divisor`.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        layers: Sequence[Layer],
        norm: Norm,
        tied: bool,
        context_length: int,
        place: Placement,
        embed_scale: float | None = None,
        logit_cap: float | None = None,
        logit_divisor: float = 1.0,
    ) -> None:
        self.vocab_size, self.context_length = vocab_size, context_length
        self._logit_cap, self._logit_divisor = logit_cap, logit_divisor
        self._embed_scale = embed_scale and torch.tensor(embed_scale).to(place.dtype).item()
        self._embed = Embedding(
            vocab_size, hidden_size, place.dtype, place.device, place.compress, place.shard
        )
        self._layers, self._norm = layers, norm
        self._ropes = list(dict.fromkeys(layer.rope for layer in layers))
        self.stretched = any(rope.stretched for rope in self._ropes)
        self._head = Head(self._embed, vocab_size, hidden_size, tied, place.linears)
        self._whole = place.shard.whole
        self.forget_steps()

    def __call__(self, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        inputs = self._inputs(batch, 1)
        if self._graphs.serve(inputs, caches):
            hidden = self._graphs(lambda given: self._hidden(given, caches), inputs, caches)
            logits = self._head(hidden)
        else:
            logits = self._replay(lambda given: self._compute(given, caches), inputs, caches)
        if self._logit_divisor != 1.0:
            logits = logits.float() / self._logit_divisor
        if self._logit_cap is not None:
            logits = torch.tanh(logits.float() / self._logit_cap) * self._logit_cap
        return logits

    def draft_tokens(
        self, batch: Batch, caches: Sequence[LayerCache], count: int, vocab_size: int
    ) -> list[tuple[Tensor, Tensor]]:
        def compute(given: Inputs) -> list[tuple[Tensor, Tensor]]:
            found: list[tuple[Tensor, Tensor]] = []
            for number in range(count):
                if number:
                    given = Inputs(given.batch.following(found[-1][1]))
                logits = self._compute(given, caches)
                found.append(argmax(logits[:, :vocab_size]))
            return found

        inputs = self._inputs(batch, count)
        return self._replay(compute, inputs, caches, passes=count, kind=(count, vocab_size))

    def _inputs(self, batch: Batch, passes: int) -> Inputs:
        """The inputs that are computed outside a step, so that the step can be recorded. The tables
        of positions grow to what it needs."""
        sizes = tuple(rope.reserve(batch.longest + passes - 1) for rope in self._ropes)
        if batch.highest >= self.vocab_size:  # kernels don't check ids
            raise IndexError(f"token {batch.highest} is beyond the {self.vocab_size} of the model")
        x = None if self._embed.recordable else self._embedded(batch)
        return Inputs(batch, x, {} if all(sizes) else self._rotations(batch), sizes)

    def _embedded(self, batch: Batch) -> Tensor:
        """[tokens, hidden]."""
        x = self._embed(batch.token_ids)
        return x if self._embed_scale is None else x * self._embed_scale

    def _rotations(self, batch: Batch) -> dict[Rope, Rotation]:
        return {rope: rope(batch.positions, batch.prompt_lengths) for rope in self._ropes}

    def _compute(self, inputs: Inputs, caches: Sequence[LayerCache]) -> Tensor:
        """Logits [batch.logits_rows, vocab_size] in the model's dtype."""
        return self._head(self._hidden(inputs, caches))

    def _hidden(self, inputs: Inputs, caches: Sequence[LayerCache]) -> Tensor:
        """Through all layers → what the head reads [batch.logits_rows, hidden]. Rows that need no
        logits are computed as far as the last layer's mixer."""
        batch = inputs.batch
        x = self._embedded(batch) if inputs.x is None else inputs.x
        rotations = inputs.rotations or self._rotations(batch)
        last = self._layers[-1]
        for layer, cache in zip(self._layers, caches, strict=True):
            mixed = layer.mix(x, rotations[layer.rope], cache, batch)
            if layer is last:
                x, mixed = batch.select_logits_rows(x), batch.select_logits_rows(mixed)
            x = layer.feed_forward(x, mixed)
        return self._norm(x)

    def rotation(self, prompt_length: int) -> tuple[int, ...]:
        return tuple(rope.variant(prompt_length) for rope in self._ropes)

    def forget_steps(self) -> None:
        # Ranks would have to make and start the same graphs at the same time: one that has no
        # memory for a graph would exchange with others that make it.
        self._replay, self._graphs = Replay(), Graphs(enabled=self._whole)

    def make_caches(self) -> list[LayerCache]:
        return [layer.make_cache() for layer in self._layers]

    def weight_map(self) -> dict[str, WeightSlot]:
        slots = self._head.weight_map("model.embed_tokens.weight", "lm_head.weight")
        slots["model.norm.weight"] = self._norm.weight_slot()
        for index, layer in enumerate(self._layers):
            slots.update(layer.weight_map(f"model.layers.{index}"))
        return slots
