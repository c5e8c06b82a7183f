"""Random producers: they submit jobs of all kinds at a steady rate, and repeat what fails."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from jobs import Client, JobError
from tests.soak.ledger import Ledger, Submitted

MODELS = ("alpha", "beta")
PAUSE_SECONDS = 0.3  # before a refused submit is repeated
DURABLE, BULK, FAILS, CANCELS, CHOICES = 0.15, 0.5, 0.03, 0.05, 0.1  # probabilities
POISON_SECONDS = 60.0  # between two jobs that kill their workers


class Producer(threading.Thread):
    """Submits `count` jobs within `seconds`, into a run of its own. `on_submit`: for jobs that
    stream. The first producer also submits jobs that kill their workers."""

    def __init__(
        self,
        url: str,
        ledger: Ledger,
        number: int,
        seed: int,
        count: int,
        seconds: float,
        on_submit: Callable[[Sequence[Submitted]], None],
    ) -> None:
        super().__init__(name=f"producer-{number}", daemon=True)
        self._url, self._ledger, self._number = url, ledger, number
        self._rng = random.Random(f"{seed}/{number}")
        self._count, self._seconds, self._on_submit = count, seconds, on_submit
        self._name = f"s{seed}-p{number}"
        self._made = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        warnings.simplefilter("ignore")  # NobodyServes, while a worker is being replaced
        start = next_poison = time.monotonic()
        try:
            with Client(self._url) as client:
                while self._made < self._count:
                    due = start + self._seconds * self._made / self._count
                    time.sleep(max(0.0, due - time.monotonic()))
                    if self._number == 0 and time.monotonic() >= next_poison:
                        next_poison = time.monotonic() + POISON_SECONDS
                        self._submit(client, [self._poison()], durable=True)
                    self._submit_some(client)
        except BaseException as error:
            self.error = error
            raise

    def _submit_some(self, client: Client) -> None:
        rng = self._rng
        bulk, durable = rng.random() < BULK, rng.random() < DURABLE
        size = rng.randint(5, 40) if bulk or durable else rng.randint(1, 8)
        contents = [self._request(bulk) for _ in range(min(size, self._count - self._made))]
        jobs = self._submit(client, contents, durable=durable)
        for job in jobs:
            if rng.random() < CANCELS:
                job.cancelled = True
                with suppress(JobError):  # it may be lost, or Redis away
                    client.job(job.id).cancel()

    def _submit(
        self, client: Client, contents: list[dict[str, Any]], *, durable: bool
    ) -> list[Submitted]:
        jobs = [self._ledger.add(content, durable) for content in contents]
        while True:
            try:
                client.submit_many([job.request for job in jobs], durable=durable)
                break
            except JobError as error:
                if not error.retryable and error.code != "timeout":
                    raise
                self._ledger.refused(error.code)
                time.sleep(PAUSE_SECONDS)
        self._ledger.confirm(jobs)
        self._on_submit([job for job in jobs if job.request.publishes])
        return jobs

    def _request(self, bulk: bool) -> dict[str, Any]:
        rng = self._rng
        metadata = {"words": str(rng.choice((3, 10, 30, 30, 60, 200)))}
        if rng.random() < FAILS:
            metadata["fail"] = "context_length_exceeded"
        return self._content(metadata, bulk, n=2 if rng.random() < CHOICES else 1)

    def _poison(self) -> dict[str, Any]:
        return self._content({"kill": "1"}, bulk=False, n=1)

    def _content(self, metadata: dict[str, str], bulk: bool, n: int) -> dict[str, Any]:
        number, self._made = self._made, self._made + 1
        return {
            "model": self._rng.choice(MODELS),
            "messages": [{"role": "user", "content": f"question {number} of {self._name}"}],
            "metadata": metadata,
            "n": n,
            "stream": True,
            "job": {
                "id": f"{self._name}-{number}",
                "run": self._name,
                "row": number,
                "priority": "bulk" if bulk else "interactive",
                "retries": 0,
            },
        }
