"""Requests for the engine's tests, and where their answers go."""

from __future__ import annotations

import threading
from typing import Any

from jobs.api.answer import ChatCompletion
from jobs.api.request import ChatRequest
from tests.waiting import PATIENCE
from worker.backend import Assembly, Outcome
from worker.local.collect import CollectingSink

PROMPT = [5, 6, 7, 8]


def ask(text: str = "hello", **fields: Any) -> ChatRequest:
    return ChatRequest(
        model="m", messages=[{"role": "user", "content": text}], **{"max_tokens": 12, **fields}
    )


class WaitingSink(CollectingSink):
    """Waits for the answer of an engine that another thread steps."""

    def __init__(self) -> None:
        super().__init__()
        self._told = threading.Event()

    def pending(self, assembly: Assembly) -> None:
        super().pending(assembly)
        self._told.set()

    def ended(self, outcome: Outcome) -> None:
        super().ended(outcome)
        self._told.set()

    def wait(self) -> ChatCompletion:
        while self.outcome is None:
            assert self._told.wait(PATIENCE)
            self._told.clear()
        return self.completion()
