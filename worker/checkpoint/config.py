"""config.json and generation_config.json of a model folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import torch

from jobs.errors import JobError
from worker.checkpoint.dtypes import FROM_CONFIG
from worker.checkpoint.files import present, read_json
from worker.checkpoint.foreign import why_without
from worker.checkpoint.quantization import Quantization, read_quantization
from worker.models.config_fields import Fields
from worker.models.model import Family

CONFIG, GENERATION = "config.json", "generation_config.json"


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults for sampling fields that a request omits. None: OpenAI's default."""

    eos_token_ids: frozenset[int] = frozenset()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def ending_with(self, *token_ids: int) -> GenerationDefaults:
        """A copy with more tokens that end a completion."""
        return replace(self, eos_token_ids=self.eos_token_ids | set(token_ids))


@dataclass(frozen=True)
class ModelConfig:
    """config.json: the family, and the fields of its text model."""

    model_type: str
    fields: Fields
    tied: bool
    eos_token_ids: frozenset[int]
    dtype: torch.dtype  # of the weights, according to the config
    quantization: Quantization | None = None
    wrapper: str | None = None  # the unsupported model_type around this text model


def read_config(folder: Path, reference: str, supported: Mapping[str, Family]) -> ModelConfig:
    """config.json of a model of one of the `supported` families.

    Raises JobError("unsupported_model"), "model_not_found" if there is no config.json.
    """
    path = folder / CONFIG
    if not present(path):
        raise JobError(
            "model_not_found",
            f"{folder} has no {CONFIG}: "
            + why_without(folder, "give a folder in Hugging Face layout, or a hub repo id"),
        )
    values = read_json(path)
    known = ", ".join(sorted(supported))
    outer = Fields(values, str(path))
    if "model_type" not in values:
        raise outer.error(f"field 'model_type' is missing; supported: {known}")
    wrapped = outer.inner("text_config")
    fields = wrapped or outer
    model_type = outer.text("model_type")
    if model_type not in supported and wrapped is not None:
        model_type = wrapped.text("model_type", model_type)
    if model_type not in supported:
        names = values.get("architectures")
        raise JobError(
            "unsupported_model",
            f"unsupported model_type '{model_type}' in {reference} (architectures {names}); "
            f"supported: {known}",
        )
    quantization = read_quantization(outer)
    if wrapped is not None:
        quantization = quantization or read_quantization(wrapped)
    given = outer.text("model_type")
    return ModelConfig(
        model_type=model_type,
        fields=fields,
        tied=outer.boolean(
            "tie_word_embeddings",
            fields.boolean("tie_word_embeddings", supported[model_type].tie_word_embeddings),
        ),
        eos_token_ids=_ids(outer, "eos_token_id") | _ids(fields, "eos_token_id"),
        dtype=_dtype(outer) or _dtype(fields) or torch.float32,
        quantization=quantization,
        wrapper=None if given in supported else given,
    )


def _dtype(fields: Fields) -> torch.dtype | None:
    """dtype, or torch_dtype in older files. The weight files take precedence."""
    name = fields.text("dtype", fields.text("torch_dtype", ""))
    return FROM_CONFIG.get(name.removeprefix("torch."))


def read_defaults(folder: Path, config: ModelConfig) -> GenerationDefaults:
    """generation_config.json if it exists, with the end tokens of config.json.

    do_sample false means greedy decoding. Without that field, the file's other fields apply.
    """
    path = folder / GENERATION
    fields = Fields(read_json(path) if present(path) else {}, str(path))
    ends = config.eos_token_ids | _ids(fields, "eos_token_id")
    if not fields.boolean("do_sample", True):
        return GenerationDefaults(eos_token_ids=ends, temperature=0.0)
    return sampling_defaults(fields, ends)


def sampling_defaults(fields: Fields, ends: frozenset[int]) -> GenerationDefaults:
    """The sampling fields of a generation_config.json. Raises JobError("unsupported_model")."""

    def number(name: str, kind: str, fits: Callable[[float], bool]) -> float | None:
        value = fields.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
            raise fields.error(f"field '{name}' must be {kind}, got {value!r}")
        return float(value)

    top_k = number("top_k", "a whole number", lambda v: v >= -1 and v == v // 1)
    return GenerationDefaults(
        eos_token_ids=ends,
        temperature=number("temperature", "a number of at least 0", lambda v: 0 <= v < inf),
        top_p=number("top_p", "a number above 0, at most 1", lambda v: 0 < v <= 1),
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p", "a number from 0 to 1", lambda v: 0 <= v <= 1),
        repetition_penalty=number("repetition_penalty", "a positive number", lambda v: 0 < v < inf),
    )


def _ids(fields: Fields, name: str) -> frozenset[int]:
    """A token id, or a list of them."""
    value = fields.values.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise fields.error(
                f"field '{name}' must be a token id or a list of them, got {value!r}"
            )
    return frozenset(ids)
