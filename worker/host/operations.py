"""The functions that start requests on an engine, by operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jobs.operations import CHAT, SCORE
from worker.backend import Handle, Sink
from worker.chat.generation import start_chat
from worker.engine.engine import EngineCore
from worker.scoring.generation import start_scoring

# Each checks a request, queues its sequences and returns its handle. It runs on the preparer's
# thread and raises JobError if the request can't run.
Start = Callable[[EngineCore, Any, Sink], Handle]

STARTS: dict[str, Start] = {CHAT.func: start_chat, SCORE.func: start_scoring}
