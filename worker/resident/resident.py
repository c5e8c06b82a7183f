"""From a reference to all that an engine holds: weights in place, tokenizer, prompts, defaults."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from jobs.errors import JobError
from worker.backend import ModelInfo
from worker.loading import weights
from worker.loading.checkpoint import Checkpoint
from worker.loading.config import GenerationDefaults
from worker.loading.source import fetch_weights, find
from worker.loading.tokenizer import Tokenizer
from worker.models.model import Model, Placement
from worker.models.registry import FAMILIES
from worker.prompt.builder import PromptBuilder
from worker.prompt.template import ChatTemplate
from worker.resident import device as devices
from worker.resident.preflight import preflight
from worker.text.reasoning import ReasoningSplitter, ReasoningTags, reasoning_tags

logger = logging.getLogger(__name__)

BLAME_SECONDS = 20.0  # how long the files are searched, once, while the batch waits


@dataclass(frozen=True)
class ResidentModel:
    """A model in place on its device, and what belongs to it."""

    info: ModelInfo
    folder: Path
    model: Model
    device: torch.device
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults
    tags: ReasoningTags | None

    def prompts(self, context: int) -> PromptBuilder:
        return PromptBuilder(self.info.name, self.tokenizer, self.template, context)

    def splitter_maker(self, prompt: str) -> Callable[[], ReasoningSplitter] | None:
        """Makes splitters for completions of this prompt; None if the model doesn't reason."""
        tags = self.tags
        if tags is None:
            return None
        inside = prompt.rstrip().endswith(tags.opening)
        return lambda: ReasoningSplitter(tags, inside=inside)

    def not_finite(self, tokens: int) -> JobError:
        """Why logits are no numbers after so many tokens: the weight that isn't one, by name."""
        fact = f"the model's logits are not finite after {tokens} tokens"
        return JobError("internal", f"{fact}: {self._blame}")

    @cached_property
    def _blame(self) -> str:
        try:
            with Checkpoint(self.folder) as checkpoint:
                return weights.blame(checkpoint, getattr(torch, self.info.dtype), BLAME_SECONDS)
        except JobError as error:
            return error.message


def load(
    reference: str, device: torch.device, dtype: str, download_dir: Path | None = None
) -> ResidentModel:
    """Check everything that can be checked, then read the weights. Raises JobError."""
    files = find(reference, download_dir)
    if files.repo is not None:
        preflight(files, device, dtype, headers=False).require_room()
        fetch_weights(files)
    found = preflight(files, device, dtype)
    found.require_room()
    config, tokenizer, template = found.config, found.tokenizer, found.template
    place = Placement(found.dtype, device)
    model = FAMILIES[config.model_type](config.fields, found.tied, place)
    with Checkpoint(files.folder) as checkpoint:
        weights.load(model.weight_map(), checkpoint)
        fingerprint = checkpoint.fingerprint()
    info = ModelInfo(
        name=files.name,
        reference=reference,
        revision=files.revision,
        family=config.model_type,
        parameters=found.parameters,
        weight_bytes=found.weight_bytes,
        dtype=found.dtype_name,
        device=str(device),
        device_name=devices.device_name(device),
        context_length=model.context_length,
        fingerprint=fingerprint,
        tokenizer_hash=tokenizer.hash,
        template_hash=template.hash if template else None,
        engine="chatjobs",
        engine_version=_version(),
        torch_version=torch.__version__,
        cuda_version=torch.version.cuda,
    )
    tags = reasoning_tags(tokenizer, template.source) if template else None
    return ResidentModel(
        info, files.folder, model, device, tokenizer, template, found.defaults, tags
    )


def _version() -> str:
    try:
        return version("chatjobs")
    except PackageNotFoundError:
        return "0"
