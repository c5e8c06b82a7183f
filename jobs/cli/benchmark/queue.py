"""Serves a load through the queue: its jobs are submitted and their streams followed by asyncio.

The jobs belong to a run of their own, `bench-<id>`, which is removed afterwards with the jobs: no
other run has a row of them.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from jobs.api.caller import run_in_thread
from jobs.cli.benchmark.figures import Timeline
from jobs.cli.benchmark.load import Load, probe
from jobs.cli.failures import Interrupted, Unavailable
from jobs.cli.options import check_server
from jobs.cli.output import echo
from jobs.cli.waiting import Notices, Rows, WaitNotice
from jobs.errors import JobError

if TYPE_CHECKING:
    from jobs import AsyncClient, ChatRequest, Client, Job, Results

QUIET_SECONDS = 3.0  # without a chunk, before the reason is looked for
ROWS_SECONDS = 60.0  # the longest wait for the rows that are to be removed
KEEP_SECONDS = 3600  # that Redis keeps the jobs of a benchmark that is killed


class QueueBench:
    """The jobs of one benchmark. A context that removes them, and their rows, at its end."""

    def __init__(
        self, connected: Client, url: str, store: Results, model: str, *, quiet: bool
    ) -> None:
        self._connected, self._url, self._store, self._model = connected, url, store, model
        self._quiet = quiet
        self._run = f"bench-{uuid4().hex[:12]}"
        self._sent: list[str] = []  # ids of the jobs
        connected.serving = None  # the notices say it

    @contextmanager
    def cleaned(self) -> Iterator[None]:
        """Remove the jobs and rows after the block, whatever ends it; SIGTERM does as Ctrl-C. If
        Redis is away, or another signal comes meanwhile, say what is left."""
        with _terminates_as_interrupt():
            try:
                yield
            except KeyboardInterrupt:
                try:
                    check_server(self._url)  # an interrupt waits for no server that is away
                    self._cancel()
                    self._remove()
                except (KeyboardInterrupt, Unavailable, JobError):
                    raise Interrupted(f"interrupted; {self._left()}") from None
                raise Interrupted("interrupted; the jobs of the benchmark are cancelled") from None
            except BaseException:
                self._end(cancel=True)
                raise
            self._end(cancel=False)

    def _end(self, *, cancel: bool) -> None:
        """Remove the jobs and rows. What was measured, or the error that has ended it, counts more
        than a server that is away now."""
        try:
            if cancel:
                self._cancel()
            self._remove()
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {self._left()}") from None
        except JobError as error:
            if not self._quiet:
                echo(f"{error.message}; {self._left()}", err=True)

    def _left(self) -> str:
        """How to remove what a benchmark has left that could not do it."""
        return (
            f"jobs of the benchmark may be left: chatjobs jobs cancel --run {self._run} ends them, "
            f"chatjobs results rm {self._run} removes their rows, and Redis keeps ended ones for "
            f"{KEEP_SECONDS // 60} minutes"
        )

    def check(self) -> None:
        """Raises JobError if workers run, and none of them serves the model, or loads it."""
        from jobs.client.serving import nobody_serves, who_loads
        from jobs.store.worker_status import read_statuses

        workers = read_statuses(self._connected.redis)
        known = self._model in workers.served or who_loads(self._model, workers.loading)
        if workers.running and not known:
            raise JobError("model_not_found", nobody_serves(self._model, workers), "model")

    def count_tokens(self, request: ChatRequest) -> int:
        """The tokens of a prompt, which a worker counts. Says what the job waits for. Raises
        JobError."""
        with WaitNotice(self._connected.connection, quiet=self._quiet) as notice:
            job = self._connected.submit(self._of_run(probe(request)))
            notice.watch(job)
            usage = job.result().usage
        return 0 if usage is None else usage.prompt_tokens

    def serve(
        self, load: Load, ended: Callable[[], None], note: Callable[[str], None]
    ) -> list[Timeline]:
        """Serve the load. `ended` is called for each request, `note` with the reason of a
        standstill."""
        return asyncio.run(self._serve(load, ended, note))

    async def _serve(
        self, load: Load, ended: Callable[[], None], note: Callable[[str], None]
    ) -> list[Timeline]:
        from jobs import AsyncClient

        free = asyncio.Semaphore(load.max_concurrency or len(load.requests))
        timelines: list[Timeline] = []
        async with AsyncClient(self._url) as client:
            begin = time.perf_counter()
            watching = asyncio.create_task(self._watch(timelines, note))
            try:
                async with asyncio.TaskGroup() as following:
                    for request, due in zip(load.requests, load.due, strict=True):
                        await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
                        await free.acquire()
                        timelines.append(Timeline(time.perf_counter() - begin))
                        following.create_task(
                            self._follow(
                                client, self._of_run(request), timelines[-1], begin, free, ended
                            )
                        )
            finally:
                watching.cancel()
        return timelines

    async def _follow(
        self,
        client: AsyncClient,
        request: ChatRequest,
        timeline: Timeline,
        begin: float,
        free: asyncio.Semaphore,
        ended: Callable[[], None],
    ) -> None:
        try:
            submitted = await run_in_thread(self._connected.submit, request)
            job = client.job(submitted.id)
            async for chunk in job.stream(on_restart="reset"):
                timeline.take(chunk, time.perf_counter() - begin)
            end = time.perf_counter() - begin
            timeline.complete(await job.result(), end)
        except JobError as error:
            timeline.fail(error.code, time.perf_counter() - begin)
        finally:
            free.release()
        ended()

    async def _watch(self, timelines: Sequence[Timeline], note: Callable[[str], None]) -> None:
        """Say that nobody serves the model, when nothing has come for a while."""
        notices, seen = Notices(), 0
        while True:
            await asyncio.sleep(QUIET_SECONDS)
            now = sum(len(one.chunks) + (one.ended > 0) for one in timelines)
            if now == seen:
                text = await asyncio.to_thread(self._reason)
                if not self._quiet and notices.is_news(text):
                    note(text)
            seen = now

    def _reason(self) -> str:
        from jobs.client.serving import nobody_serves
        from jobs.store.worker_status import read_statuses

        with suppress(Exception):  # the requests themselves meet the faults of Redis
            workers = read_statuses(self._connected.redis)
            if self._model not in workers.served:
                return f"{nobody_serves(self._model, workers)}: the benchmark waits until one does"
        return ""

    def _of_run(self, request: ChatRequest) -> ChatRequest:
        """The request as a job of this benchmark, with an id by which it can be removed."""
        self._sent.append(f"{self._run}-{len(self._sent)}")
        options: dict[str, Any] = {
            "id": self._sent[-1],
            "run": self._run,
            "priority": "interactive",
            "result_ttl": KEEP_SECONDS,
        }
        unset = ("row", "repeat", "custom_id", "session", "turn", "delay", "at")
        job = request.job.model_copy(update={**options, **dict.fromkeys(unset)})
        return request.model_copy(update={"job": job, "stream": True})

    def _jobs(self) -> list[Job]:
        """Those that Redis has: the last ones may not have been submitted."""
        jobs = [self._connected.job(one) for one in self._sent]
        return [job for job in jobs if job.status() != "unknown"]

    def _cancel(self) -> None:
        for job in self._jobs():
            with _unless_unavailable():  # it has ended meanwhile
                job.cancel()

    def _remove(self) -> None:
        """Remove the rows and the jobs; if rows can't be removed, say how to do it. Raises JobError
        if Redis is away."""
        from jobs.results.remove import remove_run
        from jobs.store.connection.protocol import run_sync
        from jobs.store.purge import purge
        from jobs.store.results_folder import read_id, read_record

        jobs = self._jobs()
        left = ""
        try:
            with WaitNotice(self._connected.connection, quiet=self._quiet) as notice:
                notice.watch(Rows((self._run,)))
                self._connected.wait_for_rows(jobs, timeout=ROWS_SECONDS)
            record = read_record(self._connected.redis)
            if record is None or record.id == read_id(self._store.root):
                remove_run(self._store, self._run)
            else:
                left = f"they are in {record.path} on {record.host}"
        except (JobError, OSError) as error:
            if isinstance(error, JobError) and error.code == "unavailable":
                raise
            left = str(error)
        for job in jobs:
            with _unless_unavailable():  # it has expired meanwhile
                run_sync(purge(job.id), self._connected.connection)
        if left and jobs and not self._quiet:
            echo(
                f"the rows of the benchmark are not removed: {left}; chatjobs results rm "
                f"{self._run} --results DIR removes them",
                err=True,
            )


@contextmanager
def _unless_unavailable() -> Iterator[None]:
    """Suppress what Redis says about one job. Where it does not answer, each further call would
    wait as long as this one."""
    try:
        yield
    except JobError as error:
        if error.code == "unavailable":
            raise


@contextmanager
def _terminates_as_interrupt() -> Iterator[None]:
    """SIGTERM in the block is as Ctrl-C, which cancels what runs and is waited for."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
