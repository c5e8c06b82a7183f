"""Contestants in processes of their own, with chatjobs' demo model."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from bench.peers import process
from bench.peers.closed_loop import Request
from bench.peers.process import PeerFailed, PeerProcess
from worker.demo import MODEL_DIR

REQUESTS: list[Request] = [([1, 2, 3], 4), ([5] * 20, 1), ([7, 8], 3)]


@pytest.fixture(scope="module")
def contestant() -> Iterator[PeerProcess]:
    with PeerProcess("chatjobs_peer", MODEL_DIR, threads=1) as process:
        yield process


def test_each_request_gets_as_many_tokens_as_it_asks_for(contestant: PeerProcess) -> None:
    served = contestant.serve(REQUESTS, at_once=2)
    assert [len(times) for times in served.arrivals] == [tokens for _, tokens in REQUESTS]
    assert served.submitted[2] >= min(times[-1] for times in served.arrivals[:2])


def test_its_memory_is_that_of_its_own_process(contestant: PeerProcess) -> None:
    assert contestant.seconds([[1, 2, 3]], tokens=2) > 0
    assert contestant.peak_bytes() > sum(file.stat().st_size for file in MODEL_DIR.iterdir())


def test_one_that_fails_says_why_and_starts_again(contestant: PeerProcess) -> None:
    with pytest.raises(PeerFailed, match="max_tokens"):
        contestant.seconds([[1, 2, 3]], tokens=-1)
    assert contestant.seconds([[1, 2, 3]], tokens=1) > 0


READY = "import os, signal, subprocess, sys, time; print('{}', flush=True)"
ANSWERED = f"{READY}; sys.stdin.readline(); print('{{\"seconds\": 1}}', flush=True)"
HANGS = "time.sleep(600)"
LONG: Request = ([1] * 100_000, 1)  # more than a pipe holds


def scripted(*script: str, limit: float) -> PeerProcess:
    """A contestant that runs these lines of Python."""
    contestant = PeerProcess("chatjobs_peer", MODEL_DIR, threads=1, limit=limit)
    contestant._command = [sys.executable, "-c", "\n".join(script)]
    return contestant


@pytest.mark.parametrize(
    "script",
    [
        ["import time", HANGS],  # while it loads
        [READY, "sys.stdin.readline()", HANGS],
        [READY, HANGS],  # and reads no question
        [READY, "subprocess.Popen(['sleep', '600'])", HANGS],  # its child keeps its pipes open
        [READY, "print('{', end='', flush=True)", HANGS],
    ],
)
def test_one_that_hangs_is_ended_at_its_limit(script: list[str]) -> None:
    with scripted(*script, limit=0.5) as contestant:
        for _ in range(2):  # it starts again
            with pytest.raises(PeerFailed, match=r"^did not end in 0\.5 s$"):
                contestant.serve([LONG], at_once=1)


def test_one_that_ends_in_time_keeps_its_answer() -> None:
    with scripted(ANSWERED, "sys.stdin.readline()", limit=600) as contestant:
        assert contestant.seconds([[1]], tokens=1) == 1


def test_one_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_SECONDS", 0)
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    with scripted(f"import signal; {ignores}", ANSWERED, HANGS, limit=600) as contestant:
        assert contestant.seconds([[1]], tokens=1) == 1
        child = contestant._process
    assert child is not None and child.returncode == -9
