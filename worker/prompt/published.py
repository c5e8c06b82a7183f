"""A document with all that makes token ids of requests: tokenizer, chat templates, special tokens.

A worker publishes it (`jobs/store/tokenizers.py`). A gateway makes token ids of it without the
model, with the same code as a worker, and without torch.

The first line is a JSON object of everything but the tokenizer, the second line its tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.api.request import ChatRequest
from jobs.errors import JobError
from worker.backend import UNKNOWN_CONTEXT
from worker.checkpoint.tokenizer import Tokenizer
from worker.prompt.builder import PromptBuilder
from worker.prompt.template import ChatTemplate


def document_of(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    special_tokens: Mapping[str, str],
    *,
    hides_tools: bool,
    bos: str,
) -> bytes:
    """The document of a model. `hides_tools`, `bos`: see PromptBuilder."""
    head = {
        "templates": None if template is None else dict(template.sources),
        "special_tokens": dict(special_tokens),
        "hides_tools": hides_tools,
        "bos": bos,
    }
    return f"{json.dumps(head)}\n{tokenizer.to_json()}".encode()


class PublishedPrompts:
    """The prompts of one model, as its workers make them, of any length. Thread-safe. Implements
    `jobs.gateway.tokenizers.Prompts`. Raises JobError for a document that it can't read."""

    def __init__(self, model: str, document: bytes) -> None:
        head, _, tokenizer = document.decode().partition("\n")
        try:
            values = json.loads(head)
            templates, self._special_tokens = values["templates"], values["special_tokens"]
            hides_tools, bos = values["hides_tools"], values["bos"]
        except (ValueError, KeyError, TypeError):
            raise JobError(
                "internal",
                f"the tokenizer of {model} is in a form that this version does not know: upgrade "
                "the older one of gateway and worker",
            ) from None
        self._tokenizer = Tokenizer(tokenizer, Path(f"the tokenizer of {model}"))
        self.vocab_size = self._tokenizer.vocab_size
        self._template = templates and ChatTemplate(templates, self._special_tokens)
        self._builder = PromptBuilder(
            model,
            self._tokenizer,
            self._template,
            UNKNOWN_CONTEXT,
            hides_tools=hides_tools,
            bos=bos,
        )

    def encode(self, request: ChatRequest) -> list[int]:
        """The token ids of a prompt. Raises JobError."""
        return self._builder.build(request).token_ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them."""
        return [self._tokenizer.piece(one) or "" for one in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Other ids have none."""
        known = [one for one in ids if 0 <= one < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """The text of one token as log-probabilities have it."""
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")

    def info(self) -> dict[str, Any]:
        """In the names of a tokenizer_config.json."""
        return {
            **self._special_tokens,
            "chat_template": self._template.source if self._template else None,
            "vocab_size": self.vocab_size,
        }

    def close(self) -> None:
        """End the process that tokenizes long prompts."""
        self._builder.close()
