"""The interface of a model's files: configuration, tokenizer, chat templates, weights.

A ModelSource is opened once and read by everything that needs a part of the model. Its small parts
are read at most once each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from worker.checkpoint.config import GenerationDefaults, ModelConfig
from worker.checkpoint.headers import Checkpoint, Headers
from worker.checkpoint.tokenizer import Tokenizer


class ModelSource(Protocol):
    """A model that can be read. All readers raise JobError: model_not_found, unsupported_model."""

    @property
    def name(self) -> str:
        """The name that queues and requests use."""

    @property
    def reference(self) -> str:
        """The model as the user has named it."""

    @property
    def revision(self) -> str | None: ...

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def defaults(self) -> GenerationDefaults: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Special tokens by the names that chat templates use: bos_token, eos_token, …"""

    @property
    def adds_bos(self) -> bool:
        """True if prompts begin with the BOS token even if the chat template doesn't write it."""

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Jinja sources by name ("default", "tool_use", …); empty if the model has none."""

    @property
    def needs_download(self) -> bool:
        """True if weights are missing that download_weights() would fetch, or came from a download
        that was killed before it had compared them."""

    def download_sizes(self) -> Mapping[Path, int]:
        """The bytes of the files that download_weights() would fetch."""

    def download_weights(self) -> None:
        """Fetch the weights that are missing. Does nothing for a local model."""

    def headers(self) -> Headers:
        """The headers of the weights, without downloading these."""

    def weights(self) -> Checkpoint:
        """The weights with their headers read and checked; use as a context manager."""


class LocalSource:
    """A part of ModelSources whose files are all there."""

    @property
    def needs_download(self) -> bool:
        return False

    def download_sizes(self) -> Mapping[Path, int]:
        return {}

    def download_weights(self) -> None:
        """Nothing to do."""
