"""The token stream under random faults: lost messages and connections, workers that come back."""

from __future__ import annotations

import random
import threading
import time
from itertools import count

import pytest

from jobs import keys
from jobs.client import follow
from jobs.store.stream import APPEND, AppendArgs
from jobs.stream.delta import Delta
from jobs.stream.entries import Entry
from tests.jobs.store.test_live import live_threads
from tests.jobs.stream.subscribers import Subscriber, client_url, text_of

REQUEST = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
TEXT = "The quick brown fox jumps over the lazy dog. Ünïcödé 🦊 too."


def cut(text: str, rng: random.Random) -> list[str]:
    """The text in parts of random length."""
    parts, at = [], 0
    while at < len(text):
        size = rng.randint(1, 5)
        parts.append(text[at : at + size])
        at += size
    return parts


SILENT_APPEND = APPEND.replace("redis.call('PUBLISH', live, ", "local _ = (", 1)
assert SILENT_APPEND != APPEND


class ChaoticWorker(threading.Thread):
    """Runs one job to its end over several attempts, with random faults."""

    def __init__(self, worker, job_id: str, seed: int, *, agrees: bool) -> None:
        super().__init__(daemon=True)
        self.agrees = agrees  # all attempts generate the same
        self.worker, self.job_id, self.rng = worker, job_id, random.Random(seed)
        self.silent = worker.redis.register_script(SILENT_APPEND)
        self.refused = 0
        self.text = ""
        self.start()

    def run(self) -> None:
        rng = self.rng
        attempts = rng.choice([1, 1, 2, 3])
        zombies: list[tuple[int, count]] = []
        for number in range(1, attempts + 1):
            attempt = self.worker.start(self.job_id)
            if number == 1 or not self.agrees:
                self.text = TEXT * rng.randint(1, 4) + str(rng.random())
            parts = cut(self.text, rng)
            if number < attempts:
                parts = parts[: rng.randint(0, len(parts))]
            elif rng.random() < 0.2:
                parts = parts[: rng.randint(0, len(parts))]  # the last entries are lost
            seqs = count(1)
            for text in parts:
                self.write(attempt, next(seqs), text)
                if zombies and rng.random() < 0.2:
                    old, old_seqs = rng.choice(zombies)
                    self.refused += not self.worker.write(
                        self.job_id, old, next(old_seqs), "ZOMBIE"
                    )
                if rng.random() < 0.3:
                    time.sleep(rng.random() * 0.004)
                if rng.random() < 0.02:
                    self.worker.redis.client_kill_filter(_type="pubsub")
                if rng.random() < 0.02:
                    self.worker.redis.client_kill_filter(_type="normal", skipme=True)
            zombies.append((attempt, seqs))
            if number < attempts:
                self.worker.requeue(self.job_id)
        self.worker.finish(self.job_id, self.text, attempt=attempts)

    def write(self, attempt: int, seq: int, text: str) -> None:
        if self.rng.random() < 0.1:  # in the log, but its message is lost
            entry = Entry(self.job_id, attempt, seq, (Delta(0, text),))
            names = [keys.log(self.job_id), keys.live(self.job_id)]
            args = [*AppendArgs(60, 10_000, 2**20), entry.id, entry.payload()]
            self.silent(keys=names, args=args)
        else:
            self.worker.write(self.job_id, attempt, seq, text)


@pytest.mark.parametrize("agrees", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_subscriber_gets_the_whole_text_and_an_end_despite_faults(
    client, worker, monkeypatch, seed, agrees
):
    """If all attempts agree, in loops that know nothing of them."""
    monkeypatch.setattr(follow, "SILENCE_SECONDS", 0.3)
    rng, before = random.Random(seed), live_threads()
    url = client_url(client)
    for round_number in range(3):
        job = client.submit(REQUEST)
        subscribers = [Subscriber(url, job.id, plain=agrees) for _ in range(2)]
        chaos = ChaoticWorker(worker, job.id, seed * 100 + round_number, agrees=agrees)
        resumed = []
        while chaos.is_alive():
            time.sleep(rng.random() * 0.03)
            if len(subscribers) < 6:
                subscribers.append(Subscriber(url, job.id, plain=agrees))
            seen = list(subscribers[0].chunks)
            if seen and len(resumed) < 4:  # another process resumes from this cursor
                cursor = seen[-1].cursor
                resumed.append((seen, Subscriber(url, job.id, cursor, plain=agrees)))
        chaos.join()
        for subscriber in subscribers:
            chunks = subscriber.end()
            assert subscriber.error is None
            assert text_of(chunks) == chaos.text
            cursors = [position(chunk) for chunk in chunks]
            assert cursors == sorted(set(cursors))
        for seen, rest in resumed:
            assert text_of(seen + rest.end()) == chaos.text
    assert live_threads() <= before


def position(chunk) -> tuple[int, int]:
    attempt, seq = chunk.cursor.split("-")
    return int(attempt), int(seq)
