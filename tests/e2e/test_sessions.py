"""Sessions while workers are killed: the history has every turn once, in order."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from jobs import ChatRequest, Session
from jobs.client.job import Job
from jobs.embedded import EmbeddedRedis
from tests.worker.fake_backend import text_of
from tests.worker.site import PATIENCE, Site, wait_until


def answer_to(content: str, words: int) -> str:
    return text_of(
        ChatRequest(
            model="fake",
            messages=[{"role": "user", "content": content}],
            metadata={"words": str(words)},
        )
    )


class Talk:
    """A session, its jobs, and the words that each question asks for."""

    def __init__(self, session: Session, rng: random.Random) -> None:
        self.session, self.jobs = session, list[Job]()
        self.words: dict[str, int] = {}
        self._rng = rng

    @property
    def over(self) -> bool:
        return all(job.status().over for job in self.jobs)

    def keep_asking(self) -> None:
        """Submit turns until two have not ended."""
        while sum(not job.status().over for job in self.jobs[-2:]) < 2:
            content = f"{self.session.id} turn {len(self.jobs)}"
            self.words[content] = self._rng.randint(5, 120)
            metadata = {"words": str(self.words[content])}
            self.jobs.append(self.session.submit(content, wait=True, metadata=metadata))

    def check(self) -> int:
        """The history has every turn once, in order. Returns the number of jobs that failed, since
        three workers had died with them."""
        history = self.session.turns()
        finished = [job.id for job in self.jobs if job.status() == "finished"]
        assert [turn.job for turn in history] == finished
        for turn in history:
            (message,) = turn.messages
            content = message["content"]
            assert turn.answer["content"] == answer_to(content, self.words[content])
            assert turn.finish_reason == "stop"
        numbers = [int(turn.messages[0]["content"].rpartition(" ")[2]) for turn in history]
        assert numbers == sorted(set(numbers))
        return len(self.jobs) - len(finished)


def check_kills(site: Site, seed: int, kills: int, sessions: int) -> None:
    """Kill and freeze workers at random in the middle of turns."""
    rng = random.Random(seed)
    site.client.serving = None
    talks = [
        Talk(site.client.session(f"s{number}", model="fake", system="Be brief."), rng)
        for number in range(sessions)
    ]
    options = {"delay": 0.004, "max_batch": 4}
    running = [site.worker(**options) for _ in range(2)]
    killed = 0
    while killed < kills:
        for talk in talks:
            talk.keep_asking()
        wait_until(lambda: site.redis.zcard("rq:wip:chat:fake"))
        time.sleep(rng.uniform(0.1, 0.7))
        number = rng.randrange(len(running))
        if rng.random() < 0.2:  # a frozen worker loses its lease, comes back and must not append
            running[number].freeze()
            time.sleep(rng.uniform(0.9, 1.6))
            running[number].thaw()
        else:
            running[number].kill()
            killed += 1
            running[number] = site.worker(**options)
    wait_until(lambda: all(talk.over for talk in talks), "a turn did not end")
    for worker in running:
        worker.stop()
    assert sum(talk.check() for talk in talks) <= kills // 3
    attempts = [int(site.hash(job)["chatjobs_attempt"]) for talk in talks for job in talk.jobs]
    assert max(attempts) > 1, "no worker died with a turn"
    assert not list(site.redis.scan_iter("chatjobs:*:open"))


def test_killed_workers_append_every_turn_once_and_in_order(site: Site) -> None:
    check_kills(site, seed=1, kills=15, sessions=6)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(2, 4))
def test_many_killed_workers_append_every_turn_once(tmp_path: Path, seed: int) -> None:
    with EmbeddedRedis(append_only=bool(seed % 2)) as server:
        site = Site(server.url, tmp_path / "results")
        try:
            check_kills(site, seed, kills=200, sessions=12)
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
            session.send(f"{name} {number}", wait=True, timeout=PATIENCE)

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
