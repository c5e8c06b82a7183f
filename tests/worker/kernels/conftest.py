"""The kernels of the levels of `tests.kernel_levels`; tests are skipped where there are none."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.kernel_levels import levels_here
from worker.kernels import library, weight_memory
from worker.kernels.build import Level
from worker.kernels.compilers import CannotBuild
from worker.kernels.library import Library

# `make sanitize` preloads AddressSanitizer, which has no room in a child process whose address
# space is limited, such as the one that renders templates.
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
if SANITIZED:
    del os.environ["LD_PRELOAD"]


@pytest.fixture(autouse=True)
def weights_in_checked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """AddressSanitizer finds accesses beyond memory of the allocator, but not of mappings."""
    if SANITIZED:
        monkeypatch.setattr(
            weight_memory, "empty", lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype)
        )


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    """Kernels divide their work among threads. Other tests use one."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, 2))
    yield
    torch.set_num_threads(before)


LEVELS: list[Level | None] = [*levels_here()]


@pytest.fixture(params=LEVELS or [None], ids=lambda level: level.name if level else "none")
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """The library of one level, as the one that layers use."""
    level: Level | None = request.param
    if level is None:
        pytest.skip("this CPU has no kernels")
    try:
        loaded = Library(level)
    except CannotBuild as error:
        pytest.skip(str(error))
    monkeypatch.setattr(library, "active", lambda: loaded)
    yield loaded
