"""Follows the streams of all jobs, over a few connections, and says whether each one was whole."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Sequence

from jobs import AsyncClient, JobError
from tests.soak.ledger import Submitted


class Followers(threading.Thread):
    """An event loop that follows jobs. `end` waits for the ends of their streams."""

    def __init__(self, url: str) -> None:
        super().__init__(name="followers", daemon=True)
        self._url = url
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.resets = 0  # of streams whose job has started again with another answer
        self.unfinished: list[str] = []  # jobs whose streams have not ended
        self.start()

    def follow(self, jobs: Sequence[Submitted]) -> None:
        """May be called from any thread."""
        for job in jobs:
            self._loop.call_soon_threadsafe(self._begin, job)

    def end(self, seconds: float) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self.join(seconds)
        self.unfinished = [task.get_name() for task in list(self._tasks)]

    def run(self) -> None:
        self._loop.run_until_complete(self._run())

    async def _run(self) -> None:
        async with AsyncClient(self._url) as client:
            self._client = client
            await self._ended.wait()
            while self._tasks:
                await asyncio.wait(self._tasks)

    def _begin(self, job: Submitted) -> None:
        task = self._loop.create_task(self._follow(job), name=job.id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, job: Submitted) -> None:
        texts: dict[int, str] = defaultdict(str)
        try:
            async for chunk in self._client.job(job.id).stream(on_restart="reset"):
                if chunk.reset:
                    self.resets += 1
                    texts.clear()
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        except JobError as error:
            job.stream = error.code
        else:
            job.stream = "whole" if texts == job.texts else f"not its answer: {dict(texts)}"
        job.stream_ended_at = time.monotonic()
