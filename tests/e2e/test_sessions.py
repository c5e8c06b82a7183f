"""Sessions while workers are killed: the history has every turn once, in order."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from jobs import ChatRequest, Session
from jobs.client.client import Job
from jobs.embedded import EmbeddedRedis
from tests.worker.fake_backend import text_of
from tests.worker.site import Site, wait_until


def answer_to(content: str, words: int) -> str:
    return text_of(
        ChatRequest(
            model="fake",
            messages=[{"role": "user", "content": content}],
            metadata={"words": str(words)},
        )
    )


def all_over(jobs: list[Job]) -> bool:
    return all(job.status().over for job in jobs)


def check_kills(site: Site, seed: int, kills: int, sessions: int, turns: int) -> None:
    """Kill workers at random while `sessions` conversations of `turns` turns wait and run."""
    rng = random.Random(seed)
    site.client.serving = None
    opened: list[Session] = [
        site.client.session(f"s{number}", model="fake", system="Be brief.")
        for number in range(sessions)
    ]
    jobs: dict[str, list[Job]] = {session.id: [] for session in opened}
    words = {}
    for number in range(turns):
        for session in opened:
            content = f"{session.id} turn {number}"
            words[content] = rng.randint(5, 60)
            metadata = {"words": str(words[content])}
            jobs[session.id].append(session.submit(content, wait=True, metadata=metadata))
    every = [job for of_one in jobs.values() for job in of_one]
    options = {"delay": 0.004, "max_batch": 4}
    running = [site.worker(**options) for _ in range(2)]
    killed = 0
    while killed < kills and not all_over(every):
        wait_until(lambda: site.redis.zcard("rq:wip:chat:fake") or all_over(every))
        time.sleep(rng.uniform(0.02, 0.3))
        number = rng.randrange(len(running))
        if rng.random() < 0.25:  # a frozen worker loses its lease, comes back and must not append
            running[number].freeze()
            time.sleep(rng.uniform(0.9, 1.6))
            running[number].thaw()
        else:
            running[number].kill()
            killed += 1
            running[number] = site.worker(**options)
    wait_until(lambda: all_over(every), "a turn did not end")
    for worker in running:
        worker.stop()
    assert killed == kills, f"the turns ended after {killed} kills: make them longer"
    for session in opened:
        history = session.turns()
        ended = [job for job in jobs[session.id] if job.status() == "finished"]
        assert [turn.job for turn in history] == [job.id for job in ended]
        lost = len(jobs[session.id]) - len(ended)  # three workers died with it
        assert lost <= kills // 3
        for turn in history:
            (message,) = turn.messages
            content = message["content"]
            assert turn.answer["content"] == answer_to(content, words[content])
            assert turn.finish_reason == "stop"
        contents = [turn.messages[0]["content"] for turn in history]
        assert contents == sorted(contents, key=lambda text: int(text.rpartition(" ")[2]))
        assert not site.redis.exists(f"chatjobs:{{{session.id}}}:open")


def test_killed_workers_append_every_turn_once_and_in_order(site: Site) -> None:
    check_kills(site, seed=1, kills=15, sessions=8, turns=14)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(2, 4))
def test_many_killed_workers_append_every_turn_once(tmp_path: Path, seed: int) -> None:
    with EmbeddedRedis(append_only=bool(seed % 2)) as server:
        site = Site(server.url, tmp_path / "results")
        try:
            check_kills(site, seed, kills=200, sessions=20, turns=100)
        finally:
            site.close()


def test_two_clients_that_send_at_once_never_interleave(site: Site) -> None:
    """Of many threads that send into one session, each waits for its turn."""
    site.client.serving = None
    site.client.session("s", model="fake")
    worker = site.worker(delay=0.002)

    def converse(name: str) -> None:
        session = site.client.session("s")
        for number in range(5):
            session.send(f"{name} {number}", wait=True, timeout=60)

    threads = [threading.Thread(target=converse, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = site.client.session("s").history()
    assert len(history) == 40
    for asked, answered in zip(history[::2], history[1::2], strict=True):
        assert answered["content"] == answer_to(asked["content"], 5)
    for name in "abcd":
        mine = [one["content"] for one in history[::2] if one["content"].startswith(name)]
        assert mine == [f"{name} {number}" for number in range(5)]
    assert worker.stop() == 0
