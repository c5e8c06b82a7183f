"""The prompts of a model as it sees them, without its weights, for `chatjobs run --dry-run`.

The command finds `open_prompts` through the entry-point group `chatjobs.local`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from worker.cli.model_facts import facts_of, obstacle_of
from worker.cli.options import need_torch

if TYPE_CHECKING:
    from jobs import ChatRequest
    from worker.loading.preflight import Preflight


def open_prompts(reference: str) -> LocalPrompts:
    """Read the small files of a model, and check it as `chatjobs models check` does. Raises
    JobError if it is not here or can't run, and a click exception without torch."""
    need_torch()
    from worker.device import Device, choose_device
    from worker.loading.description import describe
    from worker.loading.find import find
    from worker.loading.preflight import preflight
    from worker.model_spec import ModelSpec

    spec = ModelSpec(reference=reference)
    source = find(reference)
    model = describe(source)
    downloaded = not source.needs_download
    with source.weights() if downloaded else nullcontext(source.headers()) as headers:
        found = preflight(model, spec, Device(choose_device("auto")), headers)
    return LocalPrompts(found, downloaded=downloaded)


class LocalPrompts:
    """The prompts of one model, as a worker without options makes them."""

    def __init__(self, found: Preflight, *, downloaded: bool) -> None:
        from worker.loading.load import bos_of
        from worker.prompt.builder import PromptBuilder

        self.context_length = found.context_length
        self.obstacle = obstacle_of(found)
        self.facts = facts_of(found, downloaded)
        source = found.model.source
        self._builder = PromptBuilder(
            source.name,
            found.tokenizer,
            found.model.template,
            found.context_length,
            bos=bos_of(source, found.tokenizer, None),
        )

    def read(self, request: ChatRequest) -> tuple[str, int]:
        """The text of a prompt, and its number of tokens. Raises JobError."""
        prompt = self._builder.build(request)
        return prompt.text, len(prompt.token_ids)
