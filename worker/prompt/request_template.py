"""Chat templates that requests bring with them, which a worker renders only if it was told to.

They have a process of their own: what one does to it concerns no template of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache

from jobs.api.chat_template import FIELD
from worker.prompt.sandbox import Sandbox
from worker.prompt.template import ChatTemplate

KEPT = 32  # of one model


class RequestTemplates:
    """The templates of requests to one model. Thread-safe."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        self._of = lru_cache(KEPT)(self._make)

    def of(self, text: str) -> ChatTemplate:
        """The template with this text. It raises JobError("invalid_request") for all faults."""
        return self._of(text)

    def _make(self, text: str) -> ChatTemplate:
        return ChatTemplate({"default": text}, self._special_tokens, _sandbox())


@cache
def _sandbox() -> Sandbox:
    """The sandbox of all requests of this process."""
    return Sandbox(FIELD, f"the request's {FIELD}", remedy="", field=FIELD)
