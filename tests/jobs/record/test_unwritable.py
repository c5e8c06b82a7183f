"""The results disk can't be written under running workers: rows wait, and everybody says why."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import keys
from jobs.disk_faults import explain
from jobs.record import recorder as module
from tests.disks import Disk
from tests.jobs.record.outboxes import RUN, fill, numbers
from tests.jobs.record.status import assert_rows_wait, errors, status, write_one
from tests.worker.site import PATIENCE, Site, wait_until

ADVICE = {"full": "No space left on device: free space", "read-only": "mount it for writing"}


@pytest.mark.parametrize("fault", ADVICE)
def test_rows_wait_on_a_disk_that_takes_no_file(
    site: Site, make_disk: Callable[..., Disk], fault: str
) -> None:
    disk = make_disk(site.folder, size="1m")
    worker = site.worker()
    jobs = [write_one(site, 0)]
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    if fault == "full":
        disk.fill()
    else:
        disk.remount("ro")
    jobs.append(assert_rows_wait(site, 1, ADVICE[fault]))
    disk.remount("size=10m" if fault == "full" else "rw")
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    wait_until(lambda: status(site).exit_code == 0)
    site.assert_settled(jobs, RUN)
    assert worker.stop() == 0
    assert str(site.folder) in worker.output and ADVICE[fault] in worker.output


def test_a_worker_that_starts_on_a_full_disk_says_so_and_runs_jobs(
    site: Site, make_disk: Callable[..., Disk]
) -> None:
    disk = make_disk(site.folder, size="1m")
    site.submit("one")
    site.burst()
    disk.fill()
    worker = site.worker()
    wait_until(lambda: "rows can't be written now" in worker.output)
    assert_rows_wait(site, 1, ADVICE["full"])


@pytest.mark.parametrize("place", ["", "_tmp", "samples"])
def test_a_run_that_can_not_be_written_delays_no_other(site: Site, place: str) -> None:
    worker = site.worker()
    wait_until(lambda: "serves fake" in worker.output)
    blocked = site.folder / RUN / place
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("in the way")
    jobs = [assert_rows_wait(site, 0, f"{blocked}: ")]
    others = site.submit_many(["a", "b"], run="z")  # after r1 in each look at the runs
    site.client.wait_for_rows(others, timeout=PATIENCE)
    blocked.unlink()
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    site.assert_settled(jobs, RUN)
    wait_until(lambda: not errors(site))


def test_a_worker_that_alone_can_not_write_is_named_and_others_write(site: Site) -> None:
    bad = site.worker()
    wait_until(lambda: "serves fake" in bad.output)
    before = resource.prlimit(bad.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(bad.pid, resource.RLIMIT_FSIZE, (1000, before[1]))
    jobs = [write_one(site, 0)]
    wait_until(lambda: errors(site))
    good = site.worker()
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    site.assert_settled(jobs, RUN)

    def is_named() -> bool:
        found = json.loads(status(site, "--json").stdout)["rows"]["errors"]
        return [f"-{bad.pid}-" in name and "ulimit -f" in found[name] for name in found] == [True]

    wait_until(is_named)
    wait_until(lambda: (found := status(site)).exit_code == 1 and "none wait now" in found.stderr)
    resource.prlimit(bad.pid, resource.RLIMIT_FSIZE, before)
    wait_until(lambda: status(site).exit_code == 0)
    assert good.stop() == bad.stop() == 0


def test_a_fault_is_logged_again_while_it_lasts(
    site: Site, make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "WRITE_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(module, "REPEAT_LOG_SECONDS", 0.1)
    (site.folder).mkdir()
    (site.folder / RUN).write_text("in the way")
    fill(site, 3)
    make("a").start()

    def lines() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [one for one in messages if "can't be written" in one]

    wait_until(lambda: len(lines()) >= 3)
    assert (
        "(they are 3, the first one for " in lines()[0] and f"{site.folder / RUN}: " in lines()[0]
    )
    (site.folder / RUN).unlink()
    wait_until(lambda: numbers(site) == [0, 1, 2])
    wait_until(lambda: "rows are written again" in caplog.text)
    assert not site.redis.exists(keys.outbox(RUN))


def test_a_folder_that_this_user_may_not_write_is_named(site: Site) -> None:
    """Root may write anywhere but into what is immutable."""
    site.submit("one", run=RUN)
    site.burst()
    samples = site.folder / RUN / "samples"
    if subprocess.run(["chattr", "+i", samples], capture_output=True, check=False).returncode:
        pytest.skip("this user can't make a folder immutable")
    try:
        site.worker()
        job = assert_rows_wait(site, 1, "give this user write permission")
    finally:
        subprocess.run(["chattr", "-i", samples], check=True)
    site.client.wait_for_rows([job], timeout=PATIENCE)
    assert len(site.rows(RUN)) == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT, errno.ESTALE, errno.EMFILE, 999])
def test_each_fault_of_a_disk_has_its_path_and_what_to_do(tmp_path: Path, number: int) -> None:
    """Those that a test can't bring about."""
    text = explain(OSError(number, os.strerror(number)), tmp_path)
    path, reason, advice = text.split(": ", 2)
    assert (path, reason) == (str(tmp_path), os.strerror(number))
    assert advice and "\n" not in text
