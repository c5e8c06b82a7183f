"""The functions that start requests on an engine, by operation."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from jobs.api.request import ChatRequest
from jobs.operations import CHAT, SCORE
from worker.backend import Handle, Sink
from worker.chat.generation import start_chat
from worker.engine.engine import EngineCore
from worker.scoring.generation import start_scoring

# Each checks a request, queues its sequences and returns its handle. It runs on the preparer's
# thread, which may start other requests at each `yield`. Raises JobError if the request can't run.
Start = Callable[[EngineCore, Any, Sink], Generator[None, None, Handle]]


def _start_chat(
    engine: EngineCore, request: ChatRequest, sink: Sink
) -> Generator[None, None, Handle]:
    yield from ()
    return start_chat(engine, request, sink)


STARTS: dict[str, Start] = {CHAT.func: _start_chat, SCORE.func: start_scoring}
