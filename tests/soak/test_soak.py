"""The soak in short: every kind of fault at least once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jobs.embedded import server_binary
from tests.soak.run import Soak

SEED = 1
JOBS, SECONDS = 360, 30.0  # one round of the plan


@pytest.mark.skipif(
    shutil.which("cc") is None, reason="a C compiler makes the library that logs syncs"
)
@pytest.mark.timeout(900)
def test_faults_of_all_kinds_lose_nothing(tmp_path: Path) -> None:
    soak = Soak(server_binary(), tmp_path, seed=SEED, jobs=JOBS, seconds=SECONDS)
    try:
        outcome = soak.run()
    finally:
        soak.close()
    assert not outcome.problems, "\n".join(outcome.problems[:20])
    assert outcome.counts["jobs"] == JOBS
    assert outcome.counts["jobs that ran more than once"]
