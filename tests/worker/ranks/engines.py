"""Engines whose models are on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs.api.sampling import Sampling
from worker import Engine

PROMPTS = [list(range(5, 45)), list(range(9, 16)), list(range(5, 40))]
GREEDY = Sampling(temperature=0, max_tokens=12, ignore_eos=True)


def load(reference: Path | str, ranks: int, **options: Any) -> Engine:
    return Engine.load(str(reference), device="cpu", dtype="fp32", tensor_parallel=ranks, **options)


def followers(engine: Engine) -> list[int]:
    ranks = engine._core.runner.ranks
    assert ranks is not None
    return ranks.pids
