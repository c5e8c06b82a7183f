"""Contestants in processes of their own, with chatjobs' demo model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
