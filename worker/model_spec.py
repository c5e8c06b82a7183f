"""A model that is to be loaded, with all options that belong to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jobs.errors import invalid
from worker.named_device import NamedDevice

NGRAM = "ngram"  # the draft that needs no model


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
    draft: str | None = None  # a reference, or NGRAM
    draft_tokens: int | None = None
    download_dir: Path | None = None
    chat_template: Path | None = None
    trust_request_chat_template: bool = False  # requests may bring their own
    add_bos: bool | None = None
    tool_parser: str | None = None
    prompt_caches: tuple[Path, ...] = ()  # files of `chatjobs prompts save`
    tensor_parallel: int = 1  # ranks that share the model
    # Of each rank; empty: all have the cores of the process, or the first GPUs.
    rank_devices: tuple[NamedDevice, ...] = ()

    def require_types(self) -> None:
        """Raise InvalidRequest for a value of another type, as a caller in Python may give it."""
        cache_bytes = self.cache_bytes
        if cache_bytes is not None and (type(cache_bytes) is not int or cache_bytes < 0):
            raise invalid(
                f"cache_bytes must be a number of bytes, got {cache_bytes!r}", "cache_bytes"
            )
        if not isinstance(self.prefix_cache, bool):
            raise invalid(
                f"prefix_cache is True or False; got {self.prefix_cache!r}", "prefix_cache"
            )
        if self.add_bos is not None and not isinstance(self.add_bos, bool):
            raise invalid(f"add_bos is True, False or None; got {self.add_bos!r}", "add_bos")

    @property
    def draft_spec(self) -> ModelSpec | None:
        """The options of the model that drafts for this one; None without one. Weights are stored
        alike."""
        if self.draft is None or self.draft == NGRAM:
            return None
        return ModelSpec(
            reference=self.draft,
            dtype=self.dtype,
            quantize=self.quantize,
            keep_quantised=self.keep_quantised,
            download_dir=self.download_dir,
        )
