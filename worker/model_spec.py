"""A model that is to be loaded, with all options that belong to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The options of one model, which every step of loading takes whole.

    `worker.local.engine.Engine.load` documents them; None stands for a default that depends on the
    model or on the device. Values are checked by the step that uses them.
    """

    reference: str  # a folder, a GGUF file, a repository id or `demo`
    aliases: tuple[str, ...] = ()  # further names that requests may use
    dtype: str = "auto"
    quantize: str | None = None
    keep_quantised: bool = False
    context: int | None = None  # tokens
    max_batch: int | None = None  # sequences
    cache_bytes: int | None = None
    prefix_cache: bool = True
    draft: str | None = None  # a reference, or `ngram`
    draft_tokens: int | None = None
    download_dir: Path | None = None
    chat_template: Path | None = None
    add_bos: bool | None = None
    tool_parser: str | None = None
    prompt_caches: tuple[Path, ...] = ()  # files of `chatjobs prompts save`

    def of_draft(self, reference: str) -> ModelSpec:
        """Return the options of a model that drafts for this one: weights are stored alike."""
        return ModelSpec(
            reference=reference,
            dtype=self.dtype,
            quantize=self.quantize,
            keep_quantised=self.keep_quantised,
            download_dir=self.download_dir,
        )
