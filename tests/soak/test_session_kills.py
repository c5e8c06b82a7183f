"""The kills of workers in session turns, in short."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.embedded import server_binary
from tests.servers import Server
from tests.soak.session_kills import kill_workers


@pytest.mark.timeout(300)
def test_kills_in_session_turns_lose_and_repeat_no_turn(tmp_path: Path) -> None:
    server = Server(server_binary(), tmp_path / "redis")
    server.start()
    try:
        outcome = kill_workers(server, tmp_path, kills=8, seed=1)
    finally:
        server.stop()
    assert not outcome.problems, "\n".join(outcome.problems)
    assert outcome.kills == 8 and outcome.turns and outcome.turns_killed
