"""Shared by the tests of folders and disks that take no rows: what the status command says."""

from __future__ import annotations

import json
import socket

import pytest
from click.testing import CliRunner, Result

from jobs.cli import build
from jobs.client.job import Job
from jobs.errors import WaitTimeout
from tests.jobs.record.outboxes import RUN
from tests.worker.site import PATIENCE, Site, wait_until


def status(site: Site, *words: str) -> Result:
    return CliRunner().invoke(build(), ["status", *words, "--redis", site.url])


def errors(site: Site) -> list[str]:
    """Why workers can't write rows, as `status --json` says."""
    return [*json.loads(status(site, "--json").stdout)["rows"]["errors"].values()]


def write_one(site: Site, row: int) -> Job:
    (job,) = site.submit_many(["hello"], run=RUN, first_row=row)
    job.result(timeout=PATIENCE)
    return job


def assert_rows_wait(site: Site, row: int, reason: str) -> Job:
    """The row of a job that ends now waits, and status says why."""
    job = write_one(site, row)
    with pytest.raises(WaitTimeout, match="chatjobs status says why"):
        site.client.wait_for_rows([job], timeout=0.5)

    def told() -> bool:
        shown = status(site)
        return shown.exit_code == 1 and all(
            part in shown.stderr
            for part in (str(site.folder), reason, f"1 row waits in Redis, of run {RUN}")
        )

    def told_as_json() -> bool:
        found = json.loads(status(site, "--json").stdout)
        assert found["rows"]["waiting"] == 1 and found["rows"]["runs"] == {RUN: 1}
        faults = [one["results"]["error"] for one in found["workers"]]
        return bool(faults) and all(reason in fault for fault in faults)

    # A worker reports some times a lease, and leaves the status while it is stopped.
    wait_until(told, f"status does not say {reason!r}")
    wait_until(told_as_json, f"status --json does not say {reason!r}")
    wait_until(lambda: status(site, "--host", socket.gethostname()).exit_code == 0)
    return job
