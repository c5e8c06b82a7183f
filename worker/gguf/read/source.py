"""A model in a GGUF file: its configuration, tokenizer, chat templates and sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from worker.checkpoint.config import GenerationDefaults, ModelConfig, sampling_defaults
from worker.checkpoint.files import present, read_text
from worker.checkpoint.headers import Checkpoint, Headers
from worker.checkpoint.source import LocalSource
from worker.checkpoint.tokenizer import Tokenizer
from worker.gguf.read.checkpoint import GgufCheckpoint, GgufHeaders
from worker.gguf.read.config import config_fields, find_architecture
from worker.gguf.read.files import join, read_local_header
from worker.gguf.read.header import Header, StoredTensor
from worker.gguf.read.metadata import Metadata
from worker.gguf.read.tensor_views import floats
from worker.gguf.read.tensors import TensorMap
from worker.gguf.read.tokenizer import adds_bos, build_tokenizer
from worker.gguf.read.vocabulary import Vocabulary
from worker.gguf.tokenizer_keys import TEMPLATE, TEMPLATES
from worker.models.config_fields import Fields

TOKENIZER, TEMPLATE_FILE = "tokenizer.json", "chat_template.jinja"
MAX_FACTORS = 1 << 20  # bytes of a tensor of RoPE factors
SAMPLING = "general.sampling."
# Names in generation_config.json → keys under SAMPLING.
DEFAULTS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


class GgufSource(LocalSource):
    """Implements ModelSource. `parts`: all files of a split model in order, or one file. The
    header is read when it is first needed, and only once."""

    def __init__(
        self, parts: Sequence[Path], reference: str, name: str, revision: str | None = None
    ) -> None:
        self.parts, self.path = parts, parts[0]
        self.reference, self.name, self.revision = reference, name, revision

    @cached_property
    def config(self) -> ModelConfig:
        fields = self._fields
        return ModelConfig(
            model_type=fields["model_type"],
            fields=Fields(fields, str(self.path)),
            tied=fields["tie_word_embeddings"],
            eos_token_ids=self._vocabulary.ends,
            dtype=torch.float32,
        )

    @cached_property
    def defaults(self) -> GenerationDefaults:
        values = {name: self._metadata.values.get(SAMPLING + key) for name, key in DEFAULTS.items()}
        return sampling_defaults(Fields(values, str(self.path)), self.config.eos_token_ids)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.json beside the file if there is one, else from the metadata."""
        beside = self.path.parent / TOKENIZER
        if present(beside):
            return Tokenizer(read_text(beside), beside)
        return build_tokenizer(self._metadata, self._vocabulary)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self._vocabulary.names

    @cached_property
    def adds_bos(self) -> bool:
        return adds_bos(self._metadata)

    @cached_property
    def chat_templates(self) -> Mapping[str, str]:
        """The default template and those that tokenizer.chat_templates names. A chat_template.jinja
        beside the file is the default one instead."""
        metadata = self._metadata
        sources = {}
        beside = self.path.parent / TEMPLATE_FILE
        if present(beside):
            sources["default"] = read_text(beside)
        elif TEMPLATE in metadata.values:
            sources["default"] = metadata.text(TEMPLATE)
        for name in metadata.texts(TEMPLATES, []):
            sources[name] = metadata.text(f"{TEMPLATE}.{name}")
        return sources

    def headers(self) -> Headers:
        return GgufHeaders(self.path, self._header.tensors, self._tensor_map)

    def weights(self) -> Checkpoint:
        return GgufCheckpoint(self.path, self._header.tensors, self._tensor_map)

    @cached_property
    def _header(self) -> Header:
        return join([read_local_header(part) for part in self.parts])

    @cached_property
    def _metadata(self) -> Metadata:
        return Metadata(self._header.metadata, self.path)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.read(self._metadata)

    @cached_property
    def _fields(self) -> dict[str, Any]:
        return config_fields(self._metadata, self._header.tensors, self._factors)

    @property
    def _tensor_map(self) -> TensorMap:
        architecture = find_architecture(self._metadata)
        return TensorMap(architecture, self._fields, self._header.tensors)

    def _factors(self, name: str) -> list[float] | None:
        """The values of a tensor of RoPE factors; None if it is absent."""
        stored = self._header.tensors.get(name)
        if stored is None:
            return None
        if stored.end - stored.begin > MAX_FACTORS:
            raise self._metadata.error(f"tensor {name} is too large for factors of frequencies")
        return floats(stored, self._bytes_of(stored))

    def _bytes_of(self, stored: StoredTensor) -> bytes:
        with open(stored.file, "rb") as file:
            file.seek(stored.begin)
            return file.read(stored.end - stored.begin)
