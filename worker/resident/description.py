"""What the small files of a model say: everything but the weights."""

from __future__ import annotations

from dataclasses import dataclass

from worker.loading.config import GenerationDefaults, ModelConfig
from worker.loading.source import ModelSource
from worker.loading.tokenizer import Tokenizer
from worker.prompt.template import ChatTemplate, end_of_turn


@dataclass(frozen=True)
class ModelDescription:
    """A model's configuration, tokenizer and chat template."""

    source: ModelSource
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults


def describe(source: ModelSource) -> ModelDescription:
    """Read and check the small files. Raises JobError: model_not_found, unsupported_model."""
    config, tokenizer = source.config, source.tokenizer
    template, defaults = ChatTemplate.of(source), source.defaults
    if template is not None:
        end = end_of_turn(template, tokenizer)
        if end is not None:
            defaults = defaults.ending_with(end)
    return ModelDescription(source, config, tokenizer, template, defaults)
