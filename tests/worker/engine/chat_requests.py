"""Requests for the engine's tests."""

from __future__ import annotations

from typing import Any

from jobs.api.request import ChatRequest

PROMPT = [5, 6, 7, 8]


def ask(text: str = "hello", **fields: Any) -> ChatRequest:
    return ChatRequest(
        model="m", messages=[{"role": "user", "content": text}], **{"max_tokens": 12, **fields}
    )
