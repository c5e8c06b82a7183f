"""Shared by the tests of token streams: subscribers in threads, and what they have received."""

from __future__ import annotations

import threading
from typing import Any

from jobs import Client, JobError, keys
from jobs.api.chunk import ChatChunk
from tests.waiting import PATIENCE, wait_until


def text_of(chunks) -> str:
    """The text that a subscriber has after these chunks."""
    text = ""
    for chunk in chunks:
        text = "" if chunk.reset else text + chunk.text
    return text


def client_url(client: Client) -> str:
    return f"unix://{client.redis.connection_pool.connection_kwargs['path']}"


class Subscriber(threading.Thread):
    """Follows a job in a thread and collects its chunks. `plain`: as a loop that knows nothing of
    chunks with `reset`."""

    def __init__(
        self, url: str, job_id: str, after: str | None = None, *, plain: bool = False
    ) -> None:
        super().__init__(daemon=True)
        self.chunks: list[ChatChunk] = []
        self.error: JobError | None = None
        self._args = url, job_id, after
        self._options: dict[str, Any] = {} if plain else {"on_restart": "reset"}
        self.start()

    def run(self) -> None:
        url, job_id, after = self._args
        try:
            with Client(url) as client:
                for chunk in client.job(job_id).stream(after, **self._options):
                    self.chunks.append(chunk)
        except JobError as error:
            self.error = error

    def end(self) -> list:
        self.join(PATIENCE)
        assert not self.is_alive(), "the stream did not end"
        return self.chunks


def wait_for_subscriber(worker, job_id: str) -> None:
    wait_until(lambda: worker.redis.pubsub_numsub(keys.live(job_id))[0][1])
