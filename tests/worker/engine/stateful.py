"""Engines with a folder for the state of sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.api.answer import ChatCompletion
from worker import Engine
from worker.engine.prompt_caches import keep_sessions

QUESTION = "a question about the weather of the next days " * 5

Make = Callable[..., Engine]


def make(folder: Path, states: Path | None, limit: int = 1 << 30, **options: Any) -> Engine:
    """An engine with a state folder."""
    options = {"dtype": "fp32", "max_batch": 4, **options}
    engine = Engine.load(str(folder), device="cpu", **options)
    if states is not None:
        keep_sessions(engine._core, states, limit)
    return engine


def ask(engine: Engine, *texts: str, session: str | None = "s", **fields: Any) -> ChatCompletion:
    """The answer to the last text; those before it are questions and answers in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    fields = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, **fields}
    request = {"model": "m", "messages": messages, "job": {"session": session}, **fields}
    return engine.chat(request)


def cached(completion: ChatCompletion) -> int:
    usage = completion.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


def files(states: Path) -> list[Path]:
    return sorted(states.glob("*.state.safetensors"))
