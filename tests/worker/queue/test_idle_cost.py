"""The cost of an idle worker for Redis, and the way it learns of new jobs."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import pytest
import redis

from jobs import keys
from jobs.store.connection.connect import connect
from jobs.store.wake_lists import WakeLists
from tests.worker.fake_backend import FakeBackend, text_of
from tests.worker.site import PATIENCE, QUICK, ROOT, Site, wait_until
from worker.model_spec import ModelSpec
from worker.queue.capacity import Capacity
from worker.queue.loop import LEASE_SECONDS
from worker.queue.served import Served
from worker.queue.waker import Waker
from worker.service import serve

OWN_KEY = keys.wake_worker("w")
MAX_COMMANDS_PER_SECOND = 4.9  # promised are 5


def calls(site: Site) -> Counter[str]:
    """Commands that Redis has run since its start, those of scripts included."""
    stats = site.redis.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): one["calls"] for name, one in stats.items()})


def test_an_idle_worker_sends_few_commands(site: Site) -> None:
    worker = site.worker(lease_seconds=LEASE_SECONDS)
    site.submit().result(timeout=PATIENCE)
    wait_until(lambda: site.rows())
    time.sleep(3.0)
    before, start = calls(site), time.monotonic()
    time.sleep(2 * LEASE_SECONDS)
    spent = calls(site) - before
    spent["info"] -= 1
    seconds = time.monotonic() - start
    assert spent["blpop"] > 0, "the worker does not wait for jobs"
    assert spent.total() / seconds < MAX_COMMANDS_PER_SECOND, spent
    assert worker.alive


def test_a_submitted_job_wakes_a_waiting_worker(site: Site) -> None:
    woken: list[int] = []
    key = keys.wake("chat:fake")
    waker = Waker(
        WakeLists(redis.Redis.from_url(site.url), site.redis), OWN_KEY, lambda: woken.append(1)
    )
    site.submit()
    time.sleep(0.2)
    assert woken == []  # not armed: the worker has no room, and the token is for another one
    assert site.redis.llen(key) == 1
    waker.arm([key])
    wait_until(lambda: woken == [1])
    assert not site.redis.exists(key)
    waker.close()


class Rooms(FakeBackend):
    """With separate room for bulk and interactive jobs, which a test sets."""

    def __init__(self) -> None:
        super().__init__(delay=0.01)
        self.interactive, self.bulk = 2, 2

    def room(self, model: str, *, bulk: bool) -> int:
        taken = len(self.begun)  # the jobs of these tests end last
        return max(0, (self.bulk if bulk else self.interactive) - taken)


def serve_while(site: Site, backend: FakeBackend, steps: Callable[[], None]) -> None:
    """Serve in this process while a thread runs `steps`."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            steps()
        except BaseException as error:  # raised again below
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=run)
    thread.start()
    options: dict[str, Any] = {**QUICK, "grace": 0.0}
    models = [ModelSpec(reference="fake")]
    serve(backend, models, redis_url=site.url, results=site.folder, **options)
    thread.join()
    if failures:
        raise failures[0]


def waits(site: Site) -> bool:
    return bool(site.redis.info("clients")["blocked_clients"])


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
def test_a_worker_that_has_no_room_any_more_passes_the_wake_up_on(
    site: Site, priority: Literal["interactive", "bulk"]
) -> None:
    backend, key = Rooms(), keys.wake(keys.queue("fake", priority))
    site.submit("long", metadata={"words": "2000"})

    def steps() -> None:
        wait_until(lambda: waits(site))
        backend.bulk = 0
        if priority == "interactive":
            backend.interactive = 0
        later = site.submit("later", priority=priority)
        # It was taken at once, and is put back by a worker which waits for other jobs then.
        rests = (1, priority == "bulk")
        wait_until(lambda: (site.redis.llen(key), waits(site)) == rests)
        assert later.status().value == "queued"
        if priority == "interactive":
            backend.interactive = backend.bulk = 2
            wait_until(lambda: len(backend.begun) == 2)  # it looks again, though no job has ended

    serve_while(site, backend, steps)


def test_a_wake_up_is_passed_on_after_a_redis_error(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken, client, key = threading.Semaphore(0), site.redis, keys.wake("chat:fake")
    waker = Waker(WakeLists(redis.Redis.from_url(site.url), client), OWN_KEY, woken.release)
    waker.arm([key])
    site.submit()
    assert woken.acquire(timeout=PATIENCE)

    def fail(*_: Any, **__: Any) -> None:
        raise redis.ConnectionError("Connection refused")

    with monkeypatch.context() as broken:
        broken.setattr(client, "execute_command", fail)
        with pytest.raises(redis.ConnectionError):
            waker.pass_on([])
    waker.pass_on([])
    assert client.llen(key) == 1
    waker.pass_on([])
    assert client.llen(key) == 1  # once for each wake-up
    waker.close()


def test_the_queues_are_looked_at_only_while_the_worker_waits(site: Site) -> None:
    woken: list[int] = []
    asked: list[int] = []

    def job_waits() -> bool:
        asked.append(1)
        return True

    client, key = redis.Redis.from_url(site.url), keys.wake("chat:fake")
    waker = Waker(WakeLists(client, site.redis), OWN_KEY, lambda: woken.append(1))
    waker.look(job_waits)
    assert asked == []
    waker.arm([key])
    waker.look(job_waits)
    waker.look(job_waits)  # has woken, and is not armed again
    assert (asked, woken) == ([1], [1])
    waker.close()


def test_a_closed_waker_leaves_the_next_token(site: Site) -> None:
    key = keys.wake("chat:fake")
    waker = Waker(WakeLists(redis.Redis.from_url(site.url), site.redis), OWN_KEY, lambda: None)
    waker.arm([key])
    wait_until(lambda: site.redis.info("clients")["blocked_clients"] == 1)
    waker.close()
    wait_until(lambda: site.redis.info("clients")["blocked_clients"] == 0)
    site.submit()
    assert site.redis.llen(key) == 1


def test_the_tokens_of_jobs_that_nobody_waits_for_are_limited(site: Site) -> None:
    site.submit_many([f"q{i}" for i in range(100)])
    assert site.redis.llen(keys.wake("chat:fake")) == 32


def test_a_job_that_another_producer_queued_is_found(site: Site) -> None:
    site.worker()
    site.wait_for_workers()
    job = site.submit()
    job.result(timeout=PATIENCE)
    other = site.submit("later")
    site.redis.delete(keys.wake("chat:fake"))  # as if RQ's own Queue had enqueued it
    assert other.result(timeout=PATIENCE).text == text_of(other.request)


def test_a_waker_survives_redis_errors(site: Site) -> None:
    woken: list[int] = []
    site.redis.set(keys.wake("chat:fake"), "not a list")
    key = keys.wake("chat:fake")
    waker = Waker(
        WakeLists(redis.Redis.from_url(site.url), site.redis), OWN_KEY, lambda: woken.append(1)
    )
    waker.arm([key])
    wait_until(lambda: woken == [1])
    site.redis.delete(keys.wake("chat:fake"))
    site.submit()
    waker.arm([key])
    wait_until(lambda: woken == [1, 1])
    waker.close()


def test_nothing_scans_all_keys() -> None:
    files = [path for package in ("jobs", "worker") for path in (ROOT / package).rglob("*.*")]
    sources = [path for path in files if path.suffix in (".py", ".lua")]
    assert len(sources) > 100
    scanning = re.compile(r"scan_iter|\.scan\(|\bSCAN\b|\.keys\(\"")
    assert not [path for path in sources if scanning.search(path.read_text())]


def test_a_worker_without_room_for_bulk_jobs_leaves_their_tokens(site: Site) -> None:
    class Full(FakeBackend):
        def room(self, model: str, *, bulk: bool) -> int:
            return 0 if bulk else 4

    backend = Full()
    capacity = Capacity(backend, Served([backend.load(ModelSpec(reference="fake"))]), single=False)
    woken: list[int] = []
    waker = Waker(
        WakeLists(redis.Redis.from_url(site.url), site.redis), OWN_KEY, lambda: woken.append(1)
    )
    waker.arm(capacity.wake_keys)
    site.submit(priority="bulk")
    site.submit()
    wait_until(lambda: woken == [1])
    assert site.redis.llen(keys.wake("bulk:fake")) == 1
    waker.close()
    backend.close()


def test_a_worker_that_waits_for_some_jobs_can_wait_for_others(site: Site) -> None:
    woken = threading.Semaphore(0)
    waker = Waker(WakeLists(redis.Redis.from_url(site.url), site.redis), OWN_KEY, woken.release)
    interactive, bulk = keys.wake("chat:fake"), keys.wake("bulk:fake")
    waker.arm([interactive])  # the batch is full of bulk jobs
    wait_until(lambda: site.redis.info("clients")["blocked_clients"] == 1)
    waker.arm([interactive, bulk])  # they have ended
    assert woken.acquire(timeout=PATIENCE)
    waker.arm([interactive, bulk])
    site.submit(priority="bulk")
    assert woken.acquire(timeout=PATIENCE)
    assert not site.redis.exists(bulk)
    waker.close()


def test_a_foreign_value_at_its_own_key_does_not_stop_a_worker(site: Site) -> None:
    woken = threading.Semaphore(0)
    waker = Waker(WakeLists(redis.Redis.from_url(site.url), site.redis), OWN_KEY, woken.release)
    waker.arm([keys.wake("chat:fake")])
    wait_until(lambda: site.redis.info("clients")["blocked_clients"] == 1)
    site.redis.set(OWN_KEY, "not a list")
    waker.arm([keys.wake("bulk:fake")])
    waker.look(lambda: True)
    assert woken.acquire(timeout=PATIENCE)
    waker.close()


def test_a_closed_waker_leaves_the_tokens_to_others(site: Site) -> None:
    key = keys.wake("chat:fake")
    for number in range(100):
        connection = connect(site.url)
        waker = Waker(WakeLists(connection, site.redis), OWN_KEY, lambda: None)
        waker.arm([key])
        time.sleep(0.0001 * (number % 30))  # `close` meets each step of the thread
        waker.close()
        connection.close()
    wait_until(lambda: "blpop" not in [one["cmd"] for one in site.redis.client_list()])
    site.redis.rpush(key, *range(100))
    assert site.redis.llen(key) == 100


def test_a_worker_that_stops_passes_on_the_token_that_has_woken_it(site: Site) -> None:
    key = keys.wake("chat:fake")
    woken = threading.Semaphore(0)
    waker = Waker(WakeLists(redis.Redis.from_url(site.url), site.redis), OWN_KEY, woken.release)
    waker.arm([key])
    site.redis.rpush(key, 1)
    assert woken.acquire(timeout=PATIENCE)
    assert not site.redis.exists(key)
    waker.close()
    waker.pass_on(())
    assert site.redis.llen(key) == 1
