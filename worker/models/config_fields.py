"""Typed access to the fields of a config.json. Errors name the field that is missing or invalid.

Families read their configuration through this, before any weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jobs.errors import JobError
from worker.layers.rope import ROPE_TYPES, RopeConfig
from worker.layers.self_attention import HeadShape

REQUIRED: Any = object()
# The kinds of layers, as layer_types names them.
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Several times the largest published values. Larger sizes would be expensive to reject later.
MAX_INTEGER, MAX_LAYERS, MAX_EXPERTS, MAX_HEAD_DIM = 2**31 - 1, 1000, 10_000, 65_536


class Fields:
    """The fields of one JSON object of a checkpoint. `where` names the object in errors.

    A null field counts as absent. All methods raise JobError("unsupported_model").
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def _get(self, name: str, default: Any, kind: str, fits: Callable[[Any], bool]) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is REQUIRED:
                raise self.error(f"field '{name}' is missing")
            return default
        if not fits(value):
            raise self.error(f"field '{name}' must be {kind}, got {value!r}")
        return value

    def error(self, fact: str) -> JobError:
        """An unsupported_model error about this file."""
        return JobError("unsupported_model", f"{self.where}: {fact}")

    def integer(
        self, name: str, default: Any = REQUIRED, *, minimum: int = 1, maximum: int | None = None
    ) -> int:
        """A whole number from `minimum` to `maximum` (default 2**31 - 1)."""
        kind = f"a whole number of at least {minimum}"
        top = MAX_INTEGER if maximum is None else maximum
        given = self.values.get(name, 0)
        if maximum is not None or (_is_whole(given) and given > top):
            kind += f" and at most {top}"
        value: int = self._get(name, default, kind, lambda v: _is_whole(v) and minimum <= v <= top)
        return value

    def layers(self) -> int:
        """num_hidden_layers."""
        return self.integer("num_hidden_layers", maximum=MAX_LAYERS)

    def number(self, name: str, default: Any = REQUIRED, *, or_zero: bool = False) -> float:
        """A finite number above 0, or at least 0 with `or_zero`."""
        kind = "a number of at least 0" if or_zero else "a positive number"
        value = self._get(
            name, default, kind, lambda v: _is_number(v) and (v > 0 or (or_zero and v == 0))
        )
        return float(value)

    def boolean(self, name: str, default: Any = REQUIRED) -> bool:
        value: bool = self._get(name, default, "true or false", lambda v: isinstance(v, bool))
        return value

    def text(self, name: str, default: Any = REQUIRED) -> str:
        value: str = self._get(name, default, "a string", lambda v: isinstance(v, str))
        return value

    def texts(self, name: str, default: Any = REQUIRED) -> list[str]:
        """A list of strings."""
        value: list[str] = self._get(
            name,
            default,
            "a list of strings",
            lambda v: isinstance(v, list) and set(map(type, v)) <= {str},
        )
        return value

    def numbers(self, name: str, default: Any = REQUIRED) -> list[float]:
        """A list of finite numbers."""
        value: list[float] = self._get(
            name,
            default,
            "a list of numbers",
            lambda v: isinstance(v, list) and _are_numbers(v),
        )
        return value

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """A copy in which `defaults` fill absent fields."""
        return Fields({**defaults, **self.values}, self.where)

    def inner(self, name: str) -> Fields | None:
        """A nested object; None if absent."""
        value = self._get(name, None, "an object", lambda v: isinstance(v, Mapping))
        return None if value is None else Fields(value, f"{self.where}: {name}")

    def choice(self, name: str, possible: Mapping[str, Any], default: str) -> Any:
        """The entry of `possible` under the field's value."""
        value = self.text(name, default)
        if value not in possible:
            known = ", ".join(sorted(possible))
            raise self.error(f"unsupported {name} {value!r}; supported: {known}")
        return possible[value]


def read_head_shape(fields: Fields) -> HeadShape:
    """The heads of an attention layer."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(f"{heads} attention heads can't share {kv_heads} key-value heads")
    default = min(fields.integer("hidden_size") // heads, MAX_HEAD_DIM)
    return HeadShape(heads, kv_heads, fields.integer("head_dim", default, maximum=MAX_HEAD_DIM))


def read_layer_kinds(fields: Fields, layers: int, plan: list[str], possible: set[str]) -> list[str]:
    """The kind of each layer: layer_types if present, else `plan`."""
    kinds = fields.texts("layer_types", plan)
    if len(kinds) != layers or not set(kinds) <= possible:
        known = " or ".join(sorted(possible))
        raise fields.error(f"layer_types must name {known} for each of {layers} layers")
    return kinds


def read_rope(
    fields: Fields, head_dim: int, *, theta: float = 10_000.0, partial: float | None = None
) -> RopeConfig:
    """RoPE fields, in the old form (rope_theta, rope_scaling) or the new one (rope_parameters).

    `theta` and `partial` are the family's defaults. With `partial` None, all channels rotate and
    partial_rotary_factor is ignored, as in transformers. A non-null rope_scaling takes precedence.
    """
    given = fields.inner("rope_scaling") or fields.inner("rope_parameters")
    rope = given or Fields({}, fields.where)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise rope.error(f"unsupported rope_type {kind!r}; supported: {known}")
    max_positions = fields.integer("max_position_embeddings", 2048)
    original = fields.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", max_positions),
    )
    config = RopeConfig(
        head_dim=head_dim,
        max_positions=max_positions,
        theta=rope.number("rope_theta", fields.number("rope_theta", theta)),
        partial=1.0
        if partial is None
        else rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", partial)),
        kind=kind,
        original_positions=original,
        scaling=dict(rope.values),
    )
    _check_scaling(config, rope)
    return config


def _check_scaling(config: RopeConfig, rope: Fields) -> None:
    """Raise an error that names the variant's first missing or invalid field."""
    if config.partial > 1 or config.dim % 2 or config.dim < 2:
        raise rope.error(
            f"partial_rotary_factor {config.partial} of head_dim {config.head_dim} is not an even "
            "number of channels between 2 and head_dim"
        )
    if config.kind in ("linear", "dynamic", "llama3"):
        rope.number("factor")
    if config.kind in ("linear", "dynamic", "yarn"):
        most = MAX_INTEGER / max(config.max_positions, config.original)
        factor = rope.number("factor", 1.0)
        if factor > most:
            raise rope.error(f"field 'factor' must be at most {most:.0f}, got {factor:g}")
    if config.kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.error(f"low_freq_factor {low} is not below high_freq_factor {high}")
    if config.kind in ("yarn", "longrope"):
        for name in ("factor", "attention_factor"):
            rope.number(name, 1.0)
    if config.kind == "yarn":
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            rope.number(name, 1.0, or_zero=True)  # 0 counts as absent
        rope.boolean("truncate", True)
    if config.kind == "longrope":
        for name in ("short_factor", "long_factor"):
            if len(rope.numbers(name)) != config.dim // 2:
                raise rope.error(f"{name} must hold {config.dim // 2} numbers")


def _is_number(value: Any) -> bool:
    return _are_numbers([value])


def _are_numbers(values: list[Any]) -> bool:
    """True if all values are finite numbers. Vocabularies have hundreds of thousands."""
    try:
        return set(map(type, values)) <= {int, float} and all(map(math.isfinite, values))
    except OverflowError:  # an integer that no float can hold
        return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
