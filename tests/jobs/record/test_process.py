"""`chatjobs record`: rows reach Parquet without a worker, once, whatever happens to recorders."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs import JobError, keys
from jobs.record import process
from tests.jobs.record.outboxes import RUN, fill, numbers
from tests.jobs.record.status import status
from tests.servers import BINARIES, Server
from tests.waiting import PATIENCE, wait_until
from tests.worker.site import ROOT, Site

COMMAND = Path(sys.executable).with_name("chatjobs")
# With short times, so that the parts of a killed recorder are taken over soon.
QUICK = """
import logging, sys
from pathlib import Path
from jobs.record.process import record
logging.basicConfig(level=logging.INFO)
record(redis_url=sys.argv[0], results=Path(sys.argv[1]), part_seconds=0.1, plan_seconds=0.5)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start("chatjobs", "record", …)`: a process, killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: object) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                list(map(str, words)),
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )
        )
        return started[-1]

    yield run
    for one in started:
        one.kill()
        one.communicate()


def test_rows_are_written_where_torch_can_not_be_imported(site: Site) -> None:
    fill(site, 3)
    code = "import sys; sys.modules['torch'] = None; from jobs.cli import main; main()"
    words = ["record", "--once", "--redis", site.url, "--results", str(site.folder)]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert numbers(site) == [0, 1, 2]
    assert not site.redis.exists(keys.outbox(RUN), keys.parts(RUN), keys.RECORDERS)


def test_sigterm_writes_the_rows_that_wait_and_status_names_the_recorder(
    site: Site, start: Start
) -> None:
    running = start(COMMAND, "record", "--redis", site.url, "--results", site.folder)
    wait_until(lambda: site.redis.exists(keys.RECORDERS))
    (found,) = json.loads(status(site, "--json").stdout)["recorders"]
    assert found["pid"] == running.pid
    assert found["results"] == {"path": str(site.folder), "error": ""}
    assert f"recorder {found['name']} writes rows to " in status(site).stdout
    fill(site, 2)  # they are young: without the signal they would wait for more
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, err
    assert numbers(site) == [0, 1]
    assert json.loads(status(site, "--json").stdout)["recorders"] == []


def test_a_folder_that_takes_no_file_is_said_and_waited_out(site: Site, start: Start) -> None:
    site.folder.mkdir()
    (site.folder / RUN).write_text("in the way")
    running = start(sys.executable, "-m", "tests.run_code", QUICK, site.url, site.folder)
    fill(site, 1)
    wait_until(lambda: status(site).exit_code == 1)
    shown = status(site)
    assert "recorder " in shown.stderr and f"can't write rows: {site.folder / RUN}" in shown.stderr
    assert "1 recorder can't write rows; 1 row waits in Redis" in shown.stderr
    (site.folder / RUN).unlink()
    wait_until(lambda: numbers(site) == [0])
    assert running.poll() is None


def test_once_fails_if_rows_can_not_be_written(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "FINISH_SECONDS", 0.1)
    site.folder.mkdir()
    (site.folder / RUN).write_text("in the way")
    fill(site, 1)
    with pytest.raises(JobError, match="rows are left in Redis") as caught:
        process.record(redis_url=site.url, results=site.folder, once=True)
    assert caught.value.code == "unavailable"
    assert site.redis.xlen(keys.outbox(RUN)) == 1


def test_killed_and_frozen_recorders_beside_a_worker_write_each_row_once(
    tmp_path: Path, start: Start
) -> None:
    """Redis is killed once as well."""
    server = Server(BINARIES[0], tmp_path / "redis", appendonly="yes", appendfsync="always").start()
    site = Site(server.url, tmp_path / "results")
    draw = random.Random(1)

    def recorder() -> subprocess.Popen[str]:
        return start(sys.executable, "-m", "tests.run_code", QUICK, site.url, site.folder)

    try:
        site.worker(lease_seconds=2.0)
        jobs = site.submit_many(["hello"] * 400, run="one", words=1)
        jobs += site.submit_many(["hello"] * 400, run="two", words=1)
        recorders = [recorder(), recorder()]
        for number in range(10):
            time.sleep(draw.uniform(0.05, 0.3))
            victim = draw.randrange(2)
            if number == 5:
                server.kill()
                server.start()
            elif number % 2:
                recorders[victim].send_signal(signal.SIGSTOP)
                time.sleep(0.6)  # longer than it may hold a part
                recorders[victim].send_signal(signal.SIGCONT)
            else:
                recorders[victim].kill()
                recorders[victim] = recorder()
        for job in jobs:
            job.result(timeout=PATIENCE)
        site.client.wait_for_rows(jobs, timeout=PATIENCE)
        for one in recorders:
            one.send_signal(signal.SIGTERM)
        assert [one.wait(PATIENCE) for one in recorders] == [0, 0]
        for run in ("one", "two"):
            assert len(site.written(run)) == len(set(site.written(run))) == 400
    finally:
        site.close()
        server.kill()
