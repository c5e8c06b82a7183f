"""A run whose parts are killed and frozen, in short."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.embedded import server_binary
from tests.soak.run_kills import Run

ROWS = 100


@pytest.mark.timeout(600)
def test_kills_and_freezes_of_all_parts_leave_each_row_once_with_its_answer(tmp_path: Path) -> None:
    outcome = Run(server_binary(), tmp_path, rows=ROWS, faults=1, seed=1).run()
    assert not outcome.problems, "\n".join(outcome.problems[:20])
    assert outcome.rows == ROWS
    parts = {"producer", "worker", "recorder", "redis"}
    assert outcome.kills.keys() == outcome.freezes.keys() == parts
