"""Redis's clock is set back, as by NTP or a fail-over: nothing waits for as long as the step."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs import keys
from jobs.cli import build
from jobs.client.job import Job
from jobs.store.rq_layout import parse_time
from tests.servers import BINARIES, Server, clock_variables, set_clock
from tests.worker.site import PATIENCE, QUICK, Site, wait_until

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="a C compiler makes the library that sets the clock"
)
HOUR = 3600.0


@pytest.fixture(params=BINARIES, ids=lambda binary: Path(binary).name)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """Its clock is ahead by an hour: it can be set back to the real time."""
    server = Server(request.param, tmp_path / "redis", **{"hash-max-listpack-value": "2048"})
    server.with_clock().set_clock(HOUR)
    yield server.start()
    server.kill()


@pytest.fixture
def site(server: Server, tmp_path: Path) -> Iterator[Site]:
    site = Site(server.url, tmp_path / "results")
    site.client.serving = None
    yield site
    site.close()


def test_the_clock_of_the_server_can_be_set(server: Server, site: Site) -> None:
    before, _ = site.redis.time()
    server.set_clock(0)
    after, _ = site.redis.time()
    assert HOUR - 100 < before - after < HOUR + 1


def is_written(site: Site, job: Job) -> bool:
    return job.id in {row["job_id"] for row in site.rows("r")}


def test_rows_are_written_after_a_step_back(server: Server, site: Site) -> None:
    first = site.submit("before", run="r")
    worker = site.worker()
    wait_until(lambda: first.status().over)
    server.set_clock(0)
    for row in range(1, 4):
        job = site.submit(f"after {row}", run="r", first_row=row)
        wait_until(partial(is_written, site, job))
    assert worker.stop() == 0


def test_rows_whose_outbox_has_ids_from_before_the_step_are_written(
    server: Server, site: Site
) -> None:
    """The outbox is not emptied in between, so its ids stay an hour ahead."""
    old = site.submit("before", run="r")
    site.burst(results=None)
    assert old.status().over
    server.set_clock(0)
    worker = site.worker()
    wait_until(lambda: len(site.rows("r")) == 1)
    assert worker.stop() == 0


def test_parts_stay_large_while_ids_are_ahead(server: Server, site: Site) -> None:
    """A row whose age is not known waits as long as any other one."""
    site.submit_many([f"q{number}" for number in range(20)], run="r")
    site.burst(results=None)
    server.set_clock(0)
    site.submit_many([f"q{number}" for number in range(20, 40)], run="r", first_row=20)
    worker = site.worker(delay=0.02, max_batch=2, part_seconds=3600.0)
    wait_until(lambda: len(site.rows("r")) == 40)
    assert worker.stop() == 0
    assert len(site.results.files("r")) <= 4


def test_a_plan_of_a_dead_recorder_does_not_outlive_the_step(server: Server, site: Site) -> None:
    recorder = site.worker(fault="planned")
    job = site.submit("planned", run="r")
    recorder.wait()
    server.set_clock(0)
    worker = site.worker()
    wait_until(lambda: [row["job_id"] for row in site.rows("r")] == [job.id])
    assert worker.stop() == 0
    site.assert_settled([job], "r")


def test_locks_of_the_dead_do_not_outlive_the_step(server: Server, site: Site) -> None:
    doomed = site.worker()
    running = site.submit("running", words=100_000)
    done = site.submit("done", run="r")
    wait_until(lambda: running.status().value == "started" and len(site.rows("r")) == 1)
    doomed.kill()
    for lock in (keys.REAPER, keys.RECORDER, keys.upkeep(["chat:fake", "bulk:fake"])):
        site.redis.set(lock, "a worker that is gone", px=int(1000 * QUICK["lease_seconds"]))
    server.set_clock(0)
    worker = site.worker()
    more = site.submit("more", run="r", first_row=1)
    wait_until(lambda: site.hash(running).get("chatjobs_lost") == "1")
    wait_until(lambda: {row["job_id"] for row in site.rows("r")} == {done.id, more.id})
    running.cancel()
    assert worker.stop() == 0


@pytest.mark.parametrize("kind", ["delay", "retry"])
def test_a_job_that_waits_for_its_delay_does_not_wait_for_the_step(
    server: Server, site: Site, kind: str
) -> None:
    fields = {"delay": 2.0} if kind == "delay" else {"fail": "internal", "retries": 1}
    job = site.submit("x", **fields)
    worker = site.worker(part_seconds=0.2)
    wait_until(lambda: job.status().value == "scheduled" or job.status().over)
    server.set_clock(0)
    wait_until(lambda: job.status().over)
    assert worker.stop() == 0


def test_a_time_that_was_given_is_kept(server: Server, site: Site) -> None:
    """`job.at` is a time of the day: by the new clock, it is an hour later."""
    job = site.submit("x", at=datetime.now(UTC) + timedelta(seconds=HOUR + 600))
    server.set_clock(0)
    site.burst()
    assert job.status().value == "scheduled"
    server.set_clock(HOUR + 660)
    site.burst()
    assert job.status().over


def test_who_waits_for_rows_does_not_wait_for_those_of_after_the_step(
    server: Server, site: Site
) -> None:
    old = site.submit("before", run="r")
    site.burst(results=None)
    waiting = threading.Thread(target=site.client.wait_for_rows, args=([old],), daemon=True)
    waiting.start()
    wait_until(lambda: site.redis.sismember(keys.WANTED, "r"))
    (entry,) = site.redis.xrange(keys.outbox("r"))
    server.set_clock(0)
    site.redis.pipeline().delete(keys.outbox("r")).xadd(keys.outbox("r"), entry[1]).execute()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_status_and_log_say_that_the_clock_was_set_back(server: Server, site: Site) -> None:
    def status(*words: str) -> str:
        result = CliRunner().invoke(build(), ["status", "--redis", site.url, *words])
        assert result.exit_code == 0
        return result.output

    def behind() -> list[float]:
        return [one["clock_behind"] for one in json.loads(status("--json"))["workers"]]

    worker = site.worker()
    wait_until(lambda: behind() == [0])
    assert "clock" not in status()
    server.set_clock(0)
    wait_until(lambda: "set back" in status())
    wait_until(lambda: any(HOUR - 100 < seconds <= HOUR + 1 for seconds in behind()))
    server.set_clock(HOUR)
    wait_until(lambda: "set back" not in status())
    assert worker.stop() == 0
    assert worker.output.count("the clock of Redis was set back by 3") == 1


@pytest.mark.parametrize("jump", [-24 * HOUR, 24 * HOUR])
def test_a_jump_of_the_clock_of_a_worker_changes_no_duration_and_ends_no_job(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    with monkeypatch.context() as environment:
        for name, value in clock_variables(tmp_path).items():
            environment.setenv(name, value)
        site = Site(redis_url, tmp_path / "results")
        worker = site.worker(delay=0.01)
    site.client.serving = None
    running = site.submit("running", words=300, ttl=HOUR, run="r")
    wait_until(lambda: running.status().value != "queued")
    set_clock(tmp_path, jump)
    later = site.submit("later", words=300, ttl=HOUR, run="r", first_row=1)
    wait_until(lambda: len(site.rows("r")) == 2)
    for job in (running, later):
        row = site.row(job, "r")
        assert row["status"] == "ok"
        assert 0 <= row["queue_s"] < HOUR
        assert 0 <= row["ttft_s"] <= row["duration_s"] < HOUR
        assert abs(row["finished_at"].timestamp() - time.time()) < HOUR
    assert worker.stop() == 0
    site.close()


def test_a_worker_whose_clock_is_wrong_from_its_start_writes_the_times_of_redis(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as environment:
        for name, value in clock_variables(tmp_path).items():
            environment.setenv(name, value)
        set_clock(tmp_path, -24 * HOUR)
        site = Site(redis_url, tmp_path / "results")
        worker = site.worker()
    job = site.submit("x", ttl=HOUR, run="r")
    wait_until(lambda: len(site.rows("r")) == 1)
    row = site.row(job, "r")
    assert row["status"] == "ok"
    assert 0 <= row["queue_s"] < HOUR
    assert 0 <= row["duration_s"] < HOUR
    assert abs(row["finished_at"].timestamp() - time.time()) < HOUR
    ended_at = parse_time(site.hash(job)["ended_at"].encode())
    assert ended_at is not None and abs(ended_at - time.time()) < HOUR
    assert worker.stop() == 0
    site.close()
