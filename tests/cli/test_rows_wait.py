"""Rows that are not in Parquet yet: `submit --wait` waits for them, and `results` counts them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.cli.conftest import Run, Spawn
from tests.worker.site import PATIENCE, Site, wait_until

REQUESTS = "\n".join(f'{{"prompt": "{number}"}}' for number in range(30))


def test_wait_with_a_run_waits_for_its_rows(run: Run, site: Site) -> None:
    site.worker(part_seconds=3600.0)  # nothing but the wait makes it write
    words = ("submit", "-", "-m", "fake", "--run", "r1", "--wait", "-q", "--redis", site.url)
    assert run(*words, input=REQUESTS).exit_code == 0
    result = run("results", "r1", "--results", str(site.folder), "--redis", site.url)
    assert result.exit_code == 0
    assert "rows        30\n" in result.stdout
    assert "not written" not in result.stderr


def test_a_run_in_the_rows_counts_as_well(run: Run, site: Site) -> None:
    site.worker(part_seconds=3600.0)
    rows = '{"messages": [{"role": "user", "content": "a"}], "job": {"run": "r2"}}'
    words = ("submit", "-", "-m", "fake", "--wait", "-q", "--redis", site.url)
    assert run(*words, input=rows).exit_code == 0
    assert len(site.rows("r2")) == 1


def test_failed_jobs_have_rows_and_the_exit_code_stays(run: Run, site: Site) -> None:
    site.worker(part_seconds=3600.0)
    rows = '{"prompt": "a", "metadata": {"fail": "invalid_request"}}'
    words = ("submit", "-", "-m", "fake", "--run", "r1", "--wait", "-q", "--redis", site.url)
    result = run(*words, input=rows)
    assert result.exit_code == 1
    assert len(site.rows("r1")) == 1


def test_wait_says_why_rows_are_not_written_and_ends_when_they_are(
    spawn: Spawn, site: Site, tmp_path: Path
) -> None:
    worker = site.worker()
    wait_until(lambda: "serves fake" in worker.output)
    (site.folder / "r1").write_text("in the way")
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}')
    words = ("-m", "fake", "--run", "r1", "--wait", "--redis", site.url)
    process = spawn("submit", str(tmp_path / "in.jsonl"), *words)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any(f"{site.folder / 'r1'}: " in line for line in lines)
    (site.folder / "r1").unlink()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert len(site.rows("r1")) == 1


def test_wait_says_that_no_worker_writes_rows_and_can_be_interrupted(
    spawn: Spawn, site: Site, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}')
    words = ("-m", "fake", "--run", "r1", "--wait", "--redis", site.url)
    process = spawn("submit", str(tmp_path / "in.jsonl"), *words)
    wait_until(lambda: site.redis.llen("rq:queue:bulk:fake"))
    site.burst(results=None)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("no running worker writes rows" in line for line in lines)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "all jobs have ended, but rows of r1 are not written yet" in err


def test_results_counts_what_is_not_written(run: Run, site: Site, finished_run: Path) -> None:
    site.folder = finished_run
    words = ("--results", str(finished_run), "--redis", site.url)
    site.burst()  # claims the folder
    site.submit_many(["a", "b"], run="r1", first_row=10)
    site.submit("c", run="r2")
    site.burst(results=None)
    listed = run("results", *words)
    assert listed.exit_code == 0
    assert listed.stdout.splitlines() == [
        "r2         0 rows, 1 not written yet",
        "r1         3 rows, 2 not written yet",
    ]
    found = [json.loads(line) for line in run("results", "--json", *words).stdout.splitlines()]
    assert [(one["run"], one["rows"], one["unwritten"]) for one in found] == [
        ("r2", 0, 1),
        ("r1", 3, 2),
    ]
    for more in ((), ("--json",)):
        shown = run("results", "r1", *more, *words)
        assert shown.exit_code == 0
        assert "not written yet: 2 rows are in Redis (chatjobs status says why" in shown.stderr
    missing = run("results", "r2", *words)
    assert missing.exit_code == 1
    assert "no row of run r2 is written yet: 1 row is in Redis" in missing.stderr


def test_results_of_another_folder_say_nothing_about_this_redis(
    run: Run, site: Site, finished_run: Path
) -> None:
    site.burst()
    site.submit("a", run="r1")
    site.burst(results=None)
    shown = run("results", "r1", "--results", str(finished_run), "--redis", site.url)
    assert (shown.exit_code, shown.stderr) == (0, "")
    for url in ("embedded", "redis://127.0.0.1:1/0"):
        shown = run("results", "r1", "--results", str(finished_run), "--redis", url)
        assert (shown.exit_code, shown.stderr) == (0, "")


def test_results_does_not_wait_for_a_redis_that_hangs(
    run: Run, site: Site, finished_run: Path
) -> None:
    with site.paused_server():
        shown = run("results", "r1", "--results", str(finished_run), "--redis", site.url)
    assert shown.exit_code == 0
    assert "rows        3" in shown.stdout
