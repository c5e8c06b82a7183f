"""Fixtures of engines whose models are on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.ranks.engines import load
from worker import Engine
from worker.kernels import library


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    if library.active() is None:
        pytest.skip("ranks need the CPU kernels")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """An engine on several ranks, of the demo model unless another is given."""
    found: list[Engine] = []

    def begin(ranks: int = 2, reference: Path | str = "demo", **options: Any) -> Engine:
        found.append(load(reference, ranks, **options))
        return found[-1]

    yield begin
    for engine in found:
        engine.close()


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Engine, Engine]]:
    """The demo model on one rank and on two."""
    one, two = load("demo", 1), load("demo", 2)
    yield one, two
    two.close()
    one.close()
