"""A model folder in Hugging Face layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from jobs.errors import JobError
from worker.checkpoint.config import GenerationDefaults, ModelConfig, read_config, read_defaults
from worker.checkpoint.files import present, read_json, read_text
from worker.checkpoint.headers import Checkpoint, Headers
from worker.checkpoint.safetensors_files import SINGLE, SafetensorsCheckpoint
from worker.checkpoint.source import LocalSource
from worker.checkpoint.tokenizer import Tokenizer
from worker.models.registry import FAMILIES

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE, LEGACY_TEMPLATE = "chat_template.jinja", "chat_template.json"
NAMED_TEMPLATES = "additional_chat_templates"
TOKEN_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class FolderSource(LocalSource):
    """Implements ModelSource. Each file is read when it is first needed, and only once. `single`:
    the name of one file with all weights."""

    def __init__(
        self,
        path: Path,
        reference: str,
        name: str,
        revision: str | None = None,
        single: str = SINGLE,
    ) -> None:
        self.path, self.reference = path, reference
        self.name, self.revision = name, revision
        self._single = single

    @cached_property
    def config(self) -> ModelConfig:
        return read_config(self.path, self.reference, FAMILIES)

    @cached_property
    def defaults(self) -> GenerationDefaults:
        return read_defaults(self.path, self.config)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        path = self.path / TOKENIZER
        if not present(path):
            raise JobError(
                "model_not_found",
                f"{self.path} has no {TOKENIZER}: download the model again, or convert its "
                "tokenizer with the tokenizers library",
            )
        return Tokenizer(read_text(path), path)

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        """Precedence as in transformers: special_tokens_map.json overrides a tokenizer_config.json
        without added_tokens_decoder; extra_special_tokens adds names of the model's own."""
        config, path = self._tokenizer_config, self.path / SPECIAL_TOKENS
        named: dict[str, Any] = {name: config.get(name) for name in TOKEN_NAMES}
        if "added_tokens_decoder" not in config and present(path):
            overrides = read_json(path)
            named |= {name: overrides[name] for name in TOKEN_NAMES if name in overrides}
        extra = config.get("extra_special_tokens")
        if isinstance(extra, dict):
            named |= extra
        tokens = {}
        for name, value in named.items():
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
        return tokens

    @property
    def adds_bos(self) -> bool:
        """In transformers, the chat template alone writes special tokens."""
        return False

    @cached_property
    def chat_templates(self) -> Mapping[str, str]:
        """chat_template.jinja, else tokenizer_config.json, else chat_template.json;
        additional_chat_templates/ adds named templates."""
        sources: dict[str, str] = {}
        file, legacy = self.path / TEMPLATE, self.path / LEGACY_TEMPLATE
        folder = self.path / NAMED_TEMPLATES
        present(folder)  # raises for a broken link
        if present(file):
            sources["default"] = read_text(file)
        elif configured := self._tokenizer_config.get("chat_template"):
            sources.update(_named_templates(configured, self.path / TOKENIZER_CONFIG))
        elif present(legacy):
            sources.update(_named_templates(read_json(legacy).get("chat_template"), legacy))
        for path in sorted(folder.glob("*.jinja")):
            sources[path.stem] = read_text(path)
        return sources

    def headers(self) -> Headers:
        return self.weights()

    def weights(self) -> Checkpoint:
        return SafetensorsCheckpoint(self.path, self._single)

    @cached_property
    def _tokenizer_config(self) -> dict[str, Any]:
        path = self.path / TOKENIZER_CONFIG
        return read_json(path) if present(path) else {}


def _named_templates(value: Any, path: Path) -> dict[str, str]:
    """The `chat_template` field of a JSON file: one template, or a list of {name, template}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named = {}
    for entry in value if isinstance(value, list) else [None]:
        fields = entry if isinstance(entry, dict) else {}
        name, template = fields.get("name"), fields.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise JobError(
                "unsupported_model",
                f"{path}: chat_template must be a string or a list of {{name, template}}: add a "
                "valid chat_template.jinja to the folder",
            )
        named[name] = template
    return named
