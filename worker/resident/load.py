"""Loads a model: from its reference to everything that an engine needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from jobs.errors import JobError
from worker.backend import ModelInfo
from worker.loading import weights
from worker.loading.config import GenerationDefaults
from worker.loading.source import ModelSource, find
from worker.loading.tokenizer import Tokenizer
from worker.models.model import Model, Placement
from worker.models.registry import FAMILIES
from worker.prompt.builder import Prompt, PromptBuilder
from worker.prompt.template import ChatTemplate
from worker.quantise.compression import compression_of
from worker.resident import device as devices
from worker.resident.description import describe
from worker.resident.preflight import Preflight, preflight
from worker.text.reasoning import ReasoningSplitter, ReasoningTags, reasoning_tags

BLAME_SECONDS = 20.0  # limit of the search for a non-finite weight, which stalls the batch


@dataclass(frozen=True)
class ResidentModel:
    """A model with its weights on the device, its tokenizer, chat template and defaults."""

    info: ModelInfo
    source: ModelSource
    model: Model
    device: torch.device
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults
    tags: ReasoningTags | None

    def prompts(self, context: int) -> PromptBuilder:
        return PromptBuilder(self.info.name, self.tokenizer, self.template, context)

    def splitter_maker(self, prompt: Prompt) -> Callable[[], ReasoningSplitter] | None:
        """Makes splitters for completions of this prompt; None if the model doesn't reason."""
        tags = self.tags
        if tags is None:
            return None
        inside = prompt.text.rstrip().endswith(tags.opening) or tags.left_open(prompt.continued)
        return lambda: ReasoningSplitter(tags, inside=inside)

    def not_finite(self, tokens: int) -> JobError:
        """The error for non-finite logits, naming the non-finite weight if there is one."""
        fact = f"the model's logits are not finite after {tokens} tokens"
        return JobError("internal", f"{fact}: {self._non_finite_cause}")

    @cached_property
    def _non_finite_cause(self) -> str:
        try:
            with self.source.weights() as checkpoint:
                return weights.blame(checkpoint, getattr(torch, self.info.dtype), BLAME_SECONDS)
        except JobError as error:
            return error.message


def load(
    reference: str,
    device: torch.device,
    dtype: str,
    download_dir: Path | None = None,
    quantize: str | None = None,
) -> ResidentModel:
    """Check everything that can be checked, then read the weights. Raises JobError."""
    compression = compression_of(quantize)
    source = find(reference, download_dir)
    described = describe(source)
    if source.needs_download:
        preflight(described, device, dtype, source.headers(), compression).require_room()
        source.download_weights()
    with source.weights() as checkpoint:
        checked = preflight(described, device, dtype, checkpoint, compression)
        checked.require_room()
        place = Placement(checked.dtype, device, compression.apply if compression else None)
        config = described.config
        model = FAMILIES[config.model_type](config.fields, checked.tied, place)
        weights.load(model.weight_map(), checkpoint, config.quantization)
        fingerprint = checkpoint.fingerprint()
    template = described.template
    return ResidentModel(
        info=_info(checked, fingerprint),
        source=source,
        model=model,
        device=device,
        tokenizer=checked.tokenizer,
        template=template,
        defaults=described.defaults,
        tags=reasoning_tags(checked.tokenizer, template.source) if template else None,
    )


def _info(checked: Preflight, fingerprint: str) -> ModelInfo:
    source, template = checked.model.source, checked.model.template
    return ModelInfo(
        name=source.name,
        reference=source.reference,
        revision=source.revision,
        family=checked.model.config.model_type,
        parameters=checked.parameters,
        weight_bytes=checked.weight_bytes,
        dtype=checked.dtype_name,
        device=str(checked.device),
        device_name=devices.device_name(checked.device),
        context_length=checked.context_length,
        fingerprint=fingerprint,
        tokenizer_hash=checked.tokenizer.hash,
        template_hash=template.hash if template else None,
        engine="chatjobs",
        engine_version=_version(),
        torch_version=torch.__version__,
        cuda_version=torch.version.cuda,
    )


def _version() -> str:
    try:
        return version("chatjobs")
    except PackageNotFoundError:
        return "0"
