"""Runs of a data set: each row is in Parquet once, whichever process dies on the way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from openai.types.chat import ChatCompletion
from openai.types.shared import ErrorObject

from jobs import ChatRequest, keys
from jobs.runs.written_rows import WrittenRows
from jobs.store import producer_lease
from jobs.store.producer_lease import Holder, LeaseLost, ProducerLease
from jobs.store.run_rows import RunRows
from tests.waiting import PATIENCE, wait_until
from tests.worker.site import Site

COMMAND = Path(sys.executable).parent / "chatjobs"
Command = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def command() -> Iterator[Command]:
    """`command("run", …)`: a child process with pipes, or without output if `quiet`, killed at the
    end of the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: object, quiet: bool = False) -> subprocess.Popen[str]:
        pipe = subprocess.DEVNULL if quiet else subprocess.PIPE
        process = subprocess.Popen(
            [str(COMMAND), *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def data_set(folder: Path, count: int) -> Path:
    file = folder / "data.jsonl"
    rows = ({"prompt": f"What is {n} + {n}?", "target": str(2 * n)} for n in range(count))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def in_files(site: Site, run: str = "r1") -> Counter[int]:
    """The rows of a run as any reader of Parquet sees them."""
    folder = site.folder / run / "samples"
    return Counter(
        row
        for file in folder.glob("*.parquet")
        for row in pq.read_table(file)["row_index"].to_pylist()
    )


def test_each_continuation_is_there_once_after_kills_of_producer_and_worker(
    site: Site, tmp_path: Path, command: Command
) -> None:
    """The second producer packs the rows with others than the first one has."""
    file, count = tmp_path / "data.jsonl", 300
    rows = (
        {"prompt": f"{n % 7} and {n}:", "continuations": ["pear", "fig apple"]}
        for n in range(count)
    )
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    places: list[object] = ["--redis", site.url, "--results", site.folder]
    words: list[object] = ["run", file, "--mode", "loglikelihood", "-m", "demo", "--run", "r1"]
    written = WrittenRows(site.results, "r1")

    def has_written(rows: int) -> bool:
        written.refresh()
        return len(written.rows) >= rows

    worker = command("work", "--model", "demo", "--max-batch", "2", *places, quiet=True)
    producer = command(*words, "--window", "150", *places, quiet=True)
    wait_until(lambda: has_written(1))
    producer.kill()
    producer = command(*words, "--window", "90", *places)
    wait_until(lambda: has_written(150))
    worker.kill()
    command("work", "--model", "demo", *places, quiet=True)
    code, out, err = finished(producer)
    assert (code, out) == (
        0,
        "r1: 300 in, 300 rows with 600 choices, 0 missing, 0 twice, 0 failed\n",
    ), err
    found = Counter(
        (row["row_index"], row["choice_index"])
        for part in (site.folder / "r1" / "samples").glob("*.parquet")
        for row in pq.read_table(part, columns=["row_index", "choice_index"]).to_pylist()
    )
    assert found == dict.fromkeys(((n, m) for n in range(count) for m in range(2)), 1)


def test_the_same_seed_gives_the_same_samples_in_any_order_of_rows_and_workers(
    site: Site, tmp_path: Path, command: Command
) -> None:
    """With --max-batch 1. The window decides on the order in which rows are enqueued."""
    file = data_set(tmp_path, 12)
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    places: list[object] = ["--redis", site.url, "--results", site.folder]
    work: list[object] = ["work", "--model", "demo", "--max-batch", "1", *places]
    words: list[object] = ["run", file, "-m", "demo", "--seed", "7", "--num-samples", "2"]
    words += ["--max-tokens", "12", "-o", "temperature=2", *places]
    samples, orders = [], []
    for workers, window in ((1, "100"), (2, "3")):
        command(*work, quiet=True)
        site.wait_for_workers(workers)
        run = f"r{workers}"
        code, _, err = finished(command(*words, "--run", run, "--window", window))
        assert code == 0, err
        rows = sorted(site.rows(run), key=lambda row: row["started_at"])
        orders.append([(row["row_index"], row["repeat_index"]) for row in rows])
        found = zip(orders[-1], (row["output_token_ids"] for row in rows), strict=True)
        samples.append(dict(found))
    assert orders[0] != orders[1]
    assert samples[0] == samples[1]
    assert len({tuple(ids) for ids in samples[0].values()}) > 12  # they are drawn


def test_a_batch_has_each_request_once_after_kills_and_a_cancel(
    site: Site, tmp_path: Path, command: Command
) -> None:
    """Lines of output are the requests that were completed, lines of errors all others."""
    requests = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": f"row {number}"}],
                "metadata": {"fail": "context_length_exceeded"} if number % 50 == 7 else {},
                **({"temperature": "hot"} if number % 50 == 9 else {}),
            },
        }
        for number in range(150)
    ]
    file, output = tmp_path / "batch.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(f"{json.dumps(one)}\n" for one in requests))
    words: list[object] = ["run", file, "-m", "fake", "--run", "r1", "--window", "20"]
    words += ["--format", "openai-batch", "--output", output, "--order", "done"]
    words += ["--redis", site.url, "--results", site.folder]
    worker = site.worker(delay=0.02, max_batch=4)
    producer = command(*words)
    wait_until(lambda: len(in_files(site)) >= 20)
    producer.kill()
    worker.kill()
    site.worker(delay=0.05, max_batch=4)
    producer = command(*words)
    wait_until(lambda: len(in_files(site)) >= 60)
    run = site.client.run("r1")
    wait_until(lambda: run.cancel() > 4)  # more than run at once: others wait in the queue
    code, _, err = finished(producer)
    assert code == 1, err
    rows = {row["custom_id"]: row for row in site.rows("r1")}
    statuses = Counter(row["status"] for row in rows.values())
    assert statuses["error"] >= 4 and statuses["cancelled"] and statuses["ok"] >= 50

    def read(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    answers, errors = read(output), read(tmp_path / "out.errors.jsonl")
    assert [len(answers), len(errors)] == [statuses["ok"], 150 - statuses["ok"]]
    names = [line["custom_id"] for line in answers + errors]
    assert sorted(names) == sorted(str(one["custom_id"]) for one in requests)
    ends = [rows[line["custom_id"]]["finished_at"] for line in answers]
    assert ends == sorted(ends)
    for line in answers:
        body = ChatCompletion.model_validate(line["response"]["body"], strict=True)
        assert body.choices[0].message.content == rows[line["custom_id"]]["text"]
    for line in errors:
        status = rows[line["custom_id"]]["status"]
        if status == "error":
            ErrorObject.model_validate(line["response"]["body"]["error"], strict=True)
        assert (line["response"] is None) == (status == "cancelled")
        assert (line["error"] or {}).get("code") == (
            "batch_cancelled" if status == "cancelled" else None
        )


def test_four_workers_share_a_run_and_one_dies(
    site: Site, tmp_path: Path, command: Command
) -> None:
    command("record", "--redis", site.url, "--results", site.folder, quiet=True)
    options: dict[str, Any] = {"delay": 0.05, "max_batch": 2, "results": None}
    workers = [site.worker(**options) for _ in range(4)]
    site.wait_for_workers(4)
    words: list[object] = ["run", data_set(tmp_path, 60), "-m", "fake", "--run", "r1"]
    producer = command(*words, "--redis", site.url, "--results", site.folder)
    wait_until(lambda: site.redis.xlen(keys.outbox("r1")) >= 8 or in_files(site))
    workers[0].kill()
    code, out, err = finished(producer)
    assert (code, out) == (0, "r1: 60 in, 60 rows, 0 missing, 0 twice, 0 failed\n"), err
    assert in_files(site) == dict.fromkeys(range(60), 1)
    assert len({row["worker_id"] for row in site.rows("r1")}) > 1


def test_two_producers_do_not_double_a_run(site: Site, tmp_path: Path, command: Command) -> None:
    site.worker(delay=0.02)
    words: list[object] = [
        "run",
        data_set(tmp_path, 60),
        "-m",
        "fake",
        "--run",
        "r1",
        "--window",
        "10",
    ]
    words += ["--redis", site.url, "--results", site.folder]
    both = [command(*words), command(*words)]
    ends = [finished(process) for process in both]
    audit = "r1: 60 in, 60 rows, 0 missing, 0 twice, 0 failed\n"
    assert [(code, out) for code, out, _ in ends] == [(0, audit)] * 2, ends
    assert any("enqueues the rows of run r1: waiting" in err for _, _, err in ends)
    assert in_files(site) == dict.fromkeys(range(60), 1)


def test_a_frozen_producer_whose_place_was_taken_doubles_nothing(
    site: Site, tmp_path: Path, command: Command
) -> None:
    words: list[object] = [
        "run",
        data_set(tmp_path, 40),
        "-m",
        "fake",
        "--run",
        "r1",
        "--window",
        "10",
    ]
    words += ["--redis", site.url, "--results", site.folder]
    frozen = command(*words)
    wait_until(lambda: site.redis.llen("rq:queue:bulk:fake"))
    frozen.send_signal(signal.SIGSTOP)
    site.worker(delay=0.02)
    other = command(*words)
    code, _, err = finished(other)
    assert code == 0, err
    frozen.send_signal(signal.SIGCONT)
    code, out, err = finished(frozen)
    assert (code, out) == (0, "r1: 40 in, 40 rows, 0 missing, 0 twice, 0 failed\n"), err
    assert in_files(site) == dict.fromkeys(range(40), 1)


def test_ctrl_c_of_a_producer_that_waits_changes_nothing_of_the_run(
    site: Site, tmp_path: Path, command: Command
) -> None:
    with ProducerLease(site.redis, "r1") as lease:
        assert lease.acquire() is None
        words: list[object] = ["run", data_set(tmp_path, 5), "-m", "fake", "--run", "r1"]
        process = command(*words, "--redis", site.url, "--results", site.folder)
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("enqueues the rows of run r1: waiting" in line for line in lines)
        process.send_signal(signal.SIGINT)
        code, out, err = finished(process)
        assert (code, out) == (130, "")
        assert "and another process runs the others; this goes on:" in err
        assert not (site.folder / "r1").exists()
        lease.renew()


def test_a_model_that_nobody_serves_is_named_and_the_run_waits(
    site: Site, tmp_path: Path, command: Command
) -> None:
    words: list[object] = ["run", data_set(tmp_path, 5), "-m", "fake", "--run", "r1"]
    process = command(*words, "--redis", site.url, "--results", site.folder)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("no worker serves 'fake'" in line and "the run waits" in line for line in lines)
    site.worker()
    code, out, _ = finished(process)
    assert (code, out) == (0, "r1: 5 in, 5 rows, 0 missing, 0 twice, 0 failed\n")


def test_ctrl_c_drains_and_names_the_command_that_goes_on(
    site: Site, tmp_path: Path, command: Command
) -> None:
    site.worker(delay=0.05, max_batch=2)
    words: list[object] = ["run", data_set(tmp_path, 50), "-m", "fake", "--run", "r1"]
    words += ["--redis", site.url, "--results", site.folder]
    process = command(*words)
    wait_until(lambda: (site.folder / "r1/samples").is_dir())
    process.send_signal(signal.SIGINT)
    code, out, err = finished(process)
    assert (code, out) == (130, ""), err
    assert "rows are done, and no row is left in Redis" in err
    assert f"this goes on: chatjobs {' '.join(map(str, words))}" in err
    done = in_files(site)
    assert 0 < len(done) < 50
    assert not site.redis.exists("rq:queue:bulk:fake")
    site.worker()
    code, out, err = finished(command(*words))
    assert (code, out) == (0, "r1: 50 in, 50 rows, 0 missing, 0 twice, 0 failed\n"), err
    assert in_files(site) == dict.fromkeys(range(50), 1)


def test_rows_that_redis_has_lost_are_enqueued_again(
    site: Site, tmp_path: Path, command: Command
) -> None:
    words: list[object] = [
        "run",
        data_set(tmp_path, 20),
        "-m",
        "fake",
        "--run",
        "r1",
        "--window",
        "10",
    ]
    process = command(*words, "--redis", site.url, "--results", site.folder)
    wait_until(lambda: site.redis.llen("rq:queue:bulk:fake") == 10)
    site.redis.flushall()
    site.worker()
    code, out, err = finished(process)
    assert (code, out) == (0, "r1: 20 in, 20 rows, 0 missing, 0 twice, 0 failed\n"), err


def test_redis_loses_all_while_a_worker_runs_rows(
    site: Site, tmp_path: Path, command: Command
) -> None:
    site.worker()
    words: list[object] = ["run", data_set(tmp_path, 300), "-m", "fake", "--run", "r1"]
    words += ["--window", "20", "--redis", site.url, "--results", site.folder]
    process = command(*words)
    wait_until(lambda: in_files(site))
    site.redis.flushall()
    code, out, err = finished(process)
    assert (code, out) == (0, "r1: 300 in, 300 rows, 0 missing, 0 twice, 0 failed\n"), err
    assert in_files(site) == dict.fromkeys(range(300), 1)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"maxmemory": "1"}, "is full"),
        ({"min-replicas-to-write": "1"}, "NOREPLICAS"),  # refused like MISCONF of a full disk
    ],
)
def test_a_run_waits_while_redis_takes_no_writes_and_says_why(
    site: Site, tmp_path: Path, command: Command, setting: dict[str, str], reason: str
) -> None:
    words: list[object] = ["run", data_set(tmp_path, 20), "-m", "fake", "--run", "r1"]
    with site.settings(**setting):
        process = command(*words, "--redis", site.url, "--results", site.folder)
        assert process.stderr is not None
        said = next((line for line in process.stderr if reason in line), "it has ended")
    assert said.rstrip().endswith(": trying again")
    site.worker()
    code, out, err = finished(process)
    assert (code, out) == (0, "r1: 20 in, 20 rows, 0 missing, 0 twice, 0 failed\n"), err


def test_only_the_holder_of_the_lease_changes_rows(site: Site) -> None:
    request: Any = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
    ready = ChatRequest.parse({**request, "job": {"run": "r1", "row": 0}})
    with ProducerLease(site.redis, "r1") as first, ProducerLease(site.redis, "r1") as second:
        assert first.acquire() is None
        holder = second.acquire()
        assert holder is not None and not holder.is_dead
        with pytest.raises(LeaseLost):
            RunRows(site.redis, second).enqueue([ready])
        assert not list(site.redis.scan_iter("rq:job:*"))
        (job,) = RunRows(site.redis, first).enqueue([ready])
        assert not isinstance(job, Exception)


@pytest.mark.parametrize("facts", [{"processes": 1}, {"processes": None}, {"host": "other"}])
def test_a_process_that_can_not_be_seen_from_here_is_not_dead(facts: dict[str, Any]) -> None:
    """Such as one in another container with the same host name."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    token = json.loads(Holder.of_this_process().token) | {"pid": gone.pid}
    assert Holder(json.dumps(token)).is_dead
    assert not Holder(json.dumps(token | facts)).is_dead


def test_a_lease_that_has_expired_is_lost_even_if_nobody_has_it(site: Site) -> None:
    """A process that was frozen while it read rows may not enqueue them: another one has had the
    run meanwhile, and Redis has forgotten its rows."""
    request: Any = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
    ready = ChatRequest.parse({**request, "job": {"run": "r1", "row": 0}})
    with ProducerLease(site.redis, "r1") as lease:
        assert lease.acquire() is None
        site.redis.delete(keys.producer("r1"))
        with pytest.raises(LeaseLost):
            RunRows(site.redis, lease).enqueue([ready])
        with pytest.raises(LeaseLost):
            lease.renew()
        with pytest.raises(LeaseLost):
            lease.check()
        assert lease.acquire() is None
        lease.check()
    assert not site.redis.exists(keys.producer("r1"))


def test_a_lease_is_renewed_however_long_its_process_is_busy(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_lease, "RENEW_SECONDS", 0.02)
    with ProducerLease(site.redis, "r1") as lease:
        assert lease.acquire() is None
        for _ in range(2):
            site.redis.pexpire(keys.producer("r1"), 10_000)
            wait_until(lambda: site.redis.pttl(keys.producer("r1")) > 10_000)
        site.redis.set(keys.producer("r1"), "{}")
        wait_until(lambda: is_lost(lease))
    assert site.redis.get(keys.producer("r1")) == b"{}"  # released by nobody but its holder


def is_lost(lease: ProducerLease) -> bool:
    try:
        lease.check()
    except LeaseLost:
        return True
    return False
