"""Engines whose models are on several ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from jobs.api.sampling import Sampling
from tests.waiting import wait_until
from worker import Engine

PROMPTS = [list(range(5, 45)), list(range(9, 16)), list(range(5, 40))]
GREEDY = Sampling(temperature=0, max_tokens=12, ignore_eos=True)


def load(reference: Path | str, ranks: int, **options: Any) -> Engine:
    return Engine.load(str(reference), device="cpu", dtype="fp32", tensor_parallel=ranks, **options)


def followers(engine: Engine) -> list[int]:
    ranks = engine._core.runner.ranks
    assert ranks is not None
    return ranks.pids


def in_background(engine: Engine) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that generates without end, and the error that ends it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while True:
                engine.generate(PROMPTS, GREEDY)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    steps = engine._core.steps
    wait_until(lambda: errors or engine._core.steps > steps + 3)
    assert not errors
    return thread, errors
