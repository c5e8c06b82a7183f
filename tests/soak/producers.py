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
from tests.soak.conversations import Conversation
from tests.soak.ledger import Ledger, Submitted

MODELS = ("alpha", "beta")
PAUSE_SECONDS = 0.3  # before a refused submit is repeated
DURABLE, BULK, FAILS, CANCELS, CHOICES, TALKS = 0.15, 0.5, 0.03, 0.05, 0.1, 0.3  # probabilities
CONVERSATIONS, TURNS = 2, 8  # that a producer continues at a time; turns of each
POISON_SECONDS = 60.0  # between two jobs that kill their workers


class Producer(threading.Thread):
    """Submits `count` jobs within `seconds`, into a run of its own, some as turns of sessions.
    `on_submit`: for jobs that stream. The first producer also submits jobs that kill workers."""

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
        self.conversations: list[Conversation] = []
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
        if rng.random() < TALKS:
            self._talk(client, bulk, durable)
            return
        size = rng.randint(5, 40) if bulk or durable else rng.randint(1, 8)
        contents = [self._request(bulk) for _ in range(min(size, self._count - self._made))]
        self._cancel_some(client, self._submit(client, contents, durable=durable))

    def _talk(self, client: Client, bulk: bool, durable: bool) -> None:
        """Submit turns of one session. Each waits for those before it."""
        going = [one for one in self.conversations[-CONVERSATIONS:] if len(one.jobs) < TURNS]
        if len(going) < CONVERSATIONS:
            number, model = len(self.conversations), self._rng.choice(MODELS)
            new = Conversation(f"{self._name}-c{number}", model, time.monotonic())
            self.conversations.append(new)
            going.append(new)
        one = self._rng.choice(going)
        for _ in range(min(self._rng.randint(1, 3), self._count - self._made)):
            content = self._request(bulk) | {"model": one.model, "n": 1}
            content["job"] |= {"session": one.id, "turn": {"wait": True}}
            jobs = self._submit(client, [content], durable=durable, conversation=one)
            one.jobs += jobs
            self._cancel_some(client, jobs)

    def _cancel_some(self, client: Client, jobs: Sequence[Submitted]) -> None:
        for job in jobs:
            if self._rng.random() < CANCELS:
                job.cancelled = True
                with suppress(JobError):  # it may be lost, or Redis away
                    client.job(job.id).cancel()

    def _submit(
        self,
        client: Client,
        contents: list[dict[str, Any]],
        *,
        durable: bool,
        conversation: Conversation | None = None,
    ) -> list[Submitted]:
        jobs = [self._ledger.add(content, durable) for content in contents]
        while True:
            began = time.monotonic()
            try:
                if conversation is not None:  # new, or Redis may have lost it
                    client.session(conversation.id, model=conversation.model)
                client.submit_many([job.request for job in jobs], durable=durable)
                break
            except JobError as error:
                # Redis may lose a session after it was opened.
                is_lost = conversation is not None and error.code == "not_found"
                if not (error.retryable or is_lost or error.code == "timeout"):
                    raise
                self._ledger.refused(error.code)
                time.sleep(PAUSE_SECONDS)
        self._ledger.confirm(jobs, began)
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
