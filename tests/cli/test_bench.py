"""`chatjobs bench`: loads through a real Redis and workers, and with an engine in this process."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, Spawn
from tests.cli.test_json import documented
from tests.servers import BINARIES, Server
from tests.waiting import PATIENCE
from tests.worker.site import Site, wait_until


def places(site: Site) -> tuple[str, ...]:
    return ("--redis", site.url, "--results", str(site.folder))


def data_set(folder: Path, rows: list[dict[str, Any]]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps({'prompt': 'Hi', **row})}\n" for row in rows))
    return str(file)


def words(count: int, **more: str) -> dict[str, Any]:
    return {"metadata": {"words": str(count), **more}}


def assert_nothing_is_left(site: Site) -> None:
    assert site.results.runs() == []
    assert not list(site.redis.scan_iter("rq:job:*"))
    assert not list(site.redis.scan_iter("chatjobs:outbox*"))


def test_a_data_set_goes_through_the_queue_and_leaves_no_job_and_no_row(
    run: Run, site: Site, tmp_path: Path
) -> None:
    site.worker()
    site.wait_for_workers()
    file = data_set(tmp_path, [words(7, row=str(number)) for number in range(9)])
    options = ("--num-prompts", "6", "--max-concurrency", "2", "--request-rate", "1000")
    done = run("bench", "-m", "fake", "--dataset", file, *options, "--json", *places(site))
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == documented("bench")
    assert (found["completed"], found["failed"], found["errors"]) == (6, 0, {})
    assert (found["num_prompts"], found["request_rate"]) == (6, 1000)
    assert found["total_output_tokens"] == 6 * 7
    assert found["max_concurrent_requests"] <= 2
    assert found["total_input_tokens"] > 0
    assert 0 < found["mean_ttft_ms"] <= found["mean_e2el_ms"]
    assert_nothing_is_left(site)


def test_random_words_have_the_length_that_was_asked_for_and_the_table_fits_80_columns(
    run: Run, site: Site
) -> None:
    site.worker(real=True, models=["demo"])
    site.wait_for_workers()
    lengths = ("--num-prompts", "4", "--input-len", "90", "--output-len", "6")
    done = run("bench", "-m", "demo", *lengths, *places(site))
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    facts = dict((line[:34].strip(), line[34:]) for line in lines if line[34:])
    assert facts["Total generated tokens"] == str(4 * 6)
    assert abs(int(facts["Total input tokens"]) - 4 * 90) < 4 * 90 * 0.15
    assert facts["Served by"] == "workers, through the queue"
    assert [line.split()[0] for line in lines[-5:]] == ["ms", "TTFT", "TPOT", "ITL", "E2EL"]
    assert max(map(len, lines)) <= 80
    assert_nothing_is_left(site)


def test_an_engine_in_this_process_is_measured_without_redis(run: Run) -> None:
    load = ("--num-prompts", "3", "--input-len", "90", "--output-len", "6")
    limits = ("--max-concurrency", "2", "--request-rate", "1000")
    done = run("bench", "--local", "-m", "demo", *load, *limits, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == documented("bench")
    assert (found["completed"], found["total_output_tokens"]) == (3, 18)
    assert abs(found["total_input_tokens"] - 3 * 90) < 3 * 90 * 0.15
    assert found["max_concurrent_requests"] == 2
    assert found["duration"] > 0 and found["mean_tpot_ms"] > 0


@pytest.mark.parametrize("local", [True, False])
def test_failed_requests_are_counted_by_code_and_the_exit_code_is_1(
    run: Run, site: Site, tmp_path: Path, local: bool
) -> None:
    if not local:
        site.worker(real=True, models=["demo"])
        site.wait_for_workers()
    file = data_set(tmp_path, [{"max_tokens": 2}, {"prompt": "no " * 3000}, {"max_tokens": 2}])
    where = ("--local",) if local else places(site)
    done = run("bench", "-m", "demo", "--dataset", file, "--json", *where)
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["errors"] == {"context_length_exceeded": 1}
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["message"] == "1 of 3 requests failed (context_length_exceeded 1)"
    assert_nothing_is_left(site)


def test_a_request_that_no_model_takes_ends_the_benchmark_with_its_error(
    run: Run, site: Site, tmp_path: Path
) -> None:
    site.worker()
    site.wait_for_workers()
    file = data_set(tmp_path, [words(3, refuse="1")])
    done = run("bench", "-m", "fake", "--dataset", file, *places(site))
    assert done.exit_code == 1
    assert "Successful requests" not in done.stdout
    assert_nothing_is_left(site)


def test_a_model_that_nobody_serves_is_waited_for(spawn: Spawn, site: Site, tmp_path: Path) -> None:
    file = data_set(tmp_path, [words(3)])
    process = spawn("bench", "-m", "fake", "--dataset", file, "--json", *places(site))
    assert process.stderr is not None
    assert "no worker serves 'fake'" in process.stderr.readline()
    site.worker()
    out, _ = process.communicate(timeout=PATIENCE)
    assert json.loads(out)["completed"] == 1
    assert process.returncode == 0
    assert_nothing_is_left(site)


def test_a_worker_that_dies_is_missed_and_the_next_one_goes_on(
    spawn: Spawn, site: Site, tmp_path: Path
) -> None:
    first = site.worker(delay=0.05)
    site.wait_for_workers()
    file = data_set(tmp_path, [words(3), words(40)])
    process = spawn("bench", "-m", "fake", "--dataset", file, "--json", *places(site))
    wait_until(lambda: any(site.redis.scan_iter("chatjobs:*-2}:log")))  # behind the first request
    first.kill()
    assert process.stderr is not None
    notice = "the benchmark waits until one does\n"
    assert any(line.endswith(notice) for line in iter(process.stderr.readline, ""))
    site.worker()
    out, _ = process.communicate(timeout=PATIENCE)
    found = json.loads(out)
    assert (process.returncode, found["completed"], found["total_output_tokens"]) == (0, 2, 43)
    assert_nothing_is_left(site)


def test_a_model_that_the_running_workers_do_not_have_is_refused(run: Run, site: Site) -> None:
    site.worker()
    site.wait_for_workers()
    done = run("bench", "-m", "fkae", *places(site))
    assert done.exit_code != 0
    assert "no worker serves 'fkae' (models served now: fake" in done.stderr
    assert_nothing_is_left(site)


def test_a_load_of_which_nothing_was_answered_has_no_figures(
    run: Run, site: Site, tmp_path: Path
) -> None:
    site.worker()
    site.wait_for_workers()
    file = data_set(tmp_path, [{"metadata": {"fail": "timeout"}, "max_tokens": 5}])
    done = run("bench", "-m", "fake", "--dataset", file, *places(site))
    assert (done.exit_code, done.stdout) == (1, "")
    assert "timeout" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_jobs_and_removes_them(
    spawn: Spawn, site: Site, tmp_path: Path, number: signal.Signals
) -> None:
    site.worker(delay=0.05)
    site.wait_for_workers()
    file = data_set(tmp_path, [words(3), *(words(100_000) for _ in range(3))])
    process = spawn("bench", "-m", "fake", "--dataset", file, *places(site))
    wait_until(lambda: len(list(site.redis.scan_iter("chatjobs:*:log"))) > 2)
    process.send_signal(number)
    out, error = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, "")
    assert "interrupted; the jobs of the benchmark are cancelled" in error
    assert "Traceback" not in error
    assert_nothing_is_left(site)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--request-rate", "0"), "0 is not a rate above 0"),
        (("--request-rate", "nan"), "nan is not a rate above 0"),
        (("--local", "--redis", "redis://x"), "--redis is for a worker's answers"),
        (("--local", "--results", "x"), "--results is for a worker's answers"),
        (("--input-len", "3", "--dataset", "ROWS"), "--input-len is for random words"),
        (("--dataset", "ROWS"), "line 2: field 'top_p'"),
    ],
)
def test_a_wrong_load_is_refused_before_a_model_is_loaded(
    run: Run, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    file = data_set(tmp_path, [{}, {"top_p": 7}])
    done = run("bench", "-m", "demo", *(file if word == "ROWS" else word for word in words))
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_a_length_below_that_of_the_chat_template_is_refused(run: Run) -> None:
    done = run("bench", "--local", "-m", "demo", "--input-len", "2")
    assert done.exit_code == 1
    assert "--input-len 2 is too short: the chat template of demo and one word" in done.output


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A Redis that the test may end."""
    server = Server(BINARIES[0], tmp_path / "redis").start()
    yield server
    server.kill()


def running_bench(spawn: Spawn, site: Site, folder: Path) -> subprocess.Popen[str]:
    """A benchmark of which some requests run."""
    file = data_set(folder, [words(3), *(words(100_000) for _ in range(3))])
    process = spawn("bench", "-m", "fake", "--dataset", file, *places(site))
    wait_until(lambda: len(list(site.redis.scan_iter("chatjobs:*:log"))) > 2)
    return process


def test_what_was_measured_before_redis_went_away_is_printed_with_what_is_left(
    run: Run, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.store.connection.protocol.RECONNECT_SECONDS", 1.0)
    site = Site(server.url, tmp_path / "results")
    site.worker(delay=0.05)
    site.wait_for_workers()

    def end_redis() -> None:
        wait_until(lambda: len(list(site.redis.scan_iter("rq:results:bench-*"))) > 1)
        server.kill()

    killer = threading.Thread(target=end_redis)
    killer.start()
    file = data_set(tmp_path, [words(3), *(words(100_000) for _ in range(3))])
    done = run("bench", "-m", "fake", "--dataset", file, "--json", *places(site))
    killer.join()
    found = json.loads(done.stdout)
    failed = found["failed"]  # the answer to the first one may be on its way
    assert (found["completed"], found["errors"]) == (4 - failed, {"unavailable": failed})
    assert failed >= 3
    assert done.exit_code == 1
    assert "can't reach Redis" in done.stderr
    assert "chatjobs jobs cancel --run bench-" in done.stderr
    site.close()


@pytest.mark.parametrize("hangs", [True, False])
def test_an_interrupt_waits_for_no_redis_that_is_away_and_says_what_is_left(
    spawn: Spawn, server: Server, tmp_path: Path, hangs: bool
) -> None:
    site = Site(server.url, tmp_path / "results")
    site.worker(delay=0.05)
    site.wait_for_workers()
    process = running_bench(spawn, site, tmp_path)
    if hangs:
        server.send(signal.SIGSTOP)
    else:
        server.kill()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    last = error.splitlines()[-1]
    assert last.startswith("interrupted; jobs of the benchmark may be left: chatjobs jobs cancel")
    assert "Traceback" not in error
    server.kill()
    site.close()


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_removal_and_says_what_is_left(
    spawn: Spawn, site: Site, tmp_path: Path, second: signal.Signals
) -> None:
    worker = site.worker(delay=0.05)
    site.wait_for_workers()
    process = running_bench(spawn, site, tmp_path)
    worker.freeze()  # the rows of its jobs are not written
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert any("of run bench-" in line for line in iter(process.stderr.readline, ""))
    process.send_signal(second)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "interrupted; jobs of the benchmark may be left: chatjobs jobs cancel" in error
