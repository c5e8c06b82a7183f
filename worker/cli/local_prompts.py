"""The prompts of a model as it sees them, without its weights, for `chatjobs run --dry-run`.

The command finds `open_prompts` through the entry-point group `chatjobs.local`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from jobs.api.score_request import Perplexity, ScoreRequest, parse_item
from worker.cli.model_facts import facts_of
from worker.cli.options import need_torch

if TYPE_CHECKING:
    from jobs import ChatRequest
    from worker.loading.preflight import Preflight
    from worker.model_spec import ModelSpec


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
    return LocalPrompts(found, spec, downloaded=downloaded)


class LocalPrompts:
    """The prompts of one model, as a worker without options makes them. Implements `Encoding`."""

    def __init__(self, found: Preflight, spec: ModelSpec, *, downloaded: bool) -> None:
        from worker.loading.load import bos_of, prefix_token_id
        from worker.prompt.builder import PromptBuilder

        self.context_length, self.vocab_size = found.context_length, found.vocab_size
        self.obstacle = found.obstacle  # without a chat template, texts can still be scored
        self.facts = facts_of(found, spec, downloaded)
        source, self._tokenizer = found.model.source, found.tokenizer
        self.prefix_token_id = prefix_token_id(source, found.tokenizer, found.model.defaults)
        self.prompts = PromptBuilder(
            source.name,
            found.tokenizer,
            found.model.template,
            found.context_length,
            bos=bos_of(source, found.tokenizer, None),
        )

    def read(self, request: ChatRequest | ScoreRequest) -> tuple[str, int]:
        """The text of a prompt, and its number of tokens. Of a request that scores one item: the
        text of the first sequence, and the tokens of the prompt and of all that is scored. Raises
        JobError."""
        if isinstance(request, ScoreRequest):
            return self._read_item(request)
        prompt = self.prompts.build(request)
        return prompt.text, len(prompt.token_ids)

    def _read_item(self, request: ScoreRequest) -> tuple[str, int]:
        from worker.scoring.encoding import ItemEncoder

        (given,) = request.items
        item = parse_item(given)
        targets = ItemEncoder(self, request).targets(item)
        text = self._tokenizer.decode(targets[0].token_ids, skip_special_tokens=False)
        scored = sum(len(one.token_ids) - one.first for one in targets)
        return text, scored if isinstance(item, Perplexity) else targets[0].first + scored
