"""The small files of a model: everything but the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worker.checkpoint.config import GenerationDefaults, ModelConfig
from worker.checkpoint.source import ModelSource
from worker.checkpoint.tokenizer import Tokenizer
from worker.prompt.template import ChatTemplate, end_of_turn


@dataclass(frozen=True)
class ModelDescription:
    """A model's configuration, tokenizer and chat template."""

    source: ModelSource
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults


def describe(source: ModelSource, chat_template: Path | None = None) -> ModelDescription:
    """Read and check the small files; `chat_template`: instead of the model's own. Raises JobError:
    model_not_found, unsupported_model, invalid_request."""
    config, tokenizer, defaults = source.config, source.tokenizer, source.defaults
    if chat_template is None:
        template = ChatTemplate.of(source)
    else:
        template = ChatTemplate.from_file(chat_template, source)
    if template is not None:
        end = end_of_turn(template, tokenizer)
        if end is not None:
            defaults = defaults.ending_with(end)
    return ModelDescription(source, config, tokenizer, template, defaults)
