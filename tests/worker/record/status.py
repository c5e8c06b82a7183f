"""Shared by the tests of folders and disks that take no rows: what the status command says."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from jobs.cli import build
from jobs.client.client import Job
from jobs.errors import WaitTimeout
from tests.worker.record.outboxes import RUN
from tests.worker.site import Site, wait_until


def status(site: Site, *words: str) -> Result:
    return CliRunner().invoke(build(), ["status", *words, "--redis", site.url])


def errors(site: Site) -> list[str]:
    """Why workers can't write rows, as `status --json` says."""
    return [*json.loads(status(site, "--json").stdout)["rows"]["errors"].values()]


def write_one(site: Site, row: int) -> Job:
    (job,) = site.submit_many(["hello"], run=RUN, first_row=row)
    job.result(timeout=60)
    return job


def assert_rows_wait(site: Site, row: int, reason: str) -> Job:
    """The row of a job that ends now waits, and status says why."""
    job = write_one(site, row)
    wait_until(lambda: errors(site), "status says nothing")
    with pytest.raises(WaitTimeout, match="chatjobs status says why"):
        site.client.wait_for_rows([job], timeout=0.5)
    shown = status(site)
    assert shown.exit_code == 1
    assert str(site.folder) in shown.stderr and reason in shown.stderr
    assert f"1 row waits in Redis, of run {RUN}" in shown.stderr
    found = json.loads(status(site, "--json").stdout)
    assert found["rows"]["waiting"] == 1 and found["rows"]["runs"] == {RUN: 1}
    assert all(reason in worker["results"]["error"] for worker in found["workers"])
    assert status(site, "--host", found["workers"][0]["host"]).exit_code == 0
    return job
