"""`chatjobs submit`: its options, its errors, and --wait."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import Client
from jobs.cli.submit import REQUESTS_AT_ONCE
from jobs.cli.waiting import reason
from jobs.embedded import EmbeddedRedis
from jobs.store.worker_status import read_workers
from tests.cli.conftest import Run, Spawn
from tests.jobs.conftest import publish_worker
from tests.worker.site import PATIENCE, Site, wait_until


def requests_of(result: Any, redis_url: str) -> list[Any]:
    """The requests of the jobs whose ids were printed."""
    assert result.exit_code == 0, result.output
    with Client(redis_url) as client:
        return [client.job(job).request for job in result.stdout.split()]


def test_options_apply_to_all_requests(run: Run, redis_url: str) -> None:
    options = ("-o", "temperature=0", "-o", 'stop=["a"]', "-o", "reasoning_effort=low")
    lines = '{"prompt": "a", "temperature": 1}\n{"prompt": "b"}'
    words = ("submit", "-", "-m", "m", *options, "--redis", redis_url)
    for request in requests_of(run(*words, input=lines), redis_url):
        assert (request.temperature, request.stop, request.reasoning_effort) == (0, ["a"], "low")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("temprature=0", "unknown field 'temprature'; did you mean 'temperature'?"),
        ("foo=0", "unknown field 'foo'; known fields: "),
        ("model=x", "model is set by --model"),
        ("job={}", "job is set by --run, --priority, --tenant, --delay and FILE"),
        ("temperature", "'temperature' is not KEY=VALUE"),
    ],
)
def test_a_wrong_option_is_wrong_usage(run: Run, option: str, message: str) -> None:
    result = run("submit", "-", "-m", "m", "-o", option, input='{"prompt": "a"}')
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_csv_and_parquet_files_are_taken(run: Run, redis_url: str, tmp_path: Path) -> None:
    rows = {"prompt": ["1", "2"], "target": ["one", "two"], "temperature": [0, 1]}
    (tmp_path / "a.csv").write_text("prompt,target,temperature\n1,one,0\n2,two,1\n")
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        result = run("submit", str(tmp_path / name), "-m", "m", "--redis", redis_url)
        found = requests_of(result, redis_url)
        assert [request.messages[0].text for request in found] == ["1", "2"]
        assert [request.job.target for request in found] == ["one", "two"]
        assert [request.temperature for request in found] == [0, 1]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_unknown_columns_are_refused_or_kept(
    run: Run, redis_url: str, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    rows = [{"prompt": "a", "level": "007", "source": "x"}]
    if name == "a.csv":
        path.write_text("prompt,level,source\na,007,x\n")
    elif name == "a.jsonl":
        path.write_text(json.dumps(rows[0]))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    words = ("submit", str(path), "-m", "m", "--redis", redis_url)
    result = run(*words)
    assert result.exit_code == 2
    assert "unknown field 'level'" in result.stderr
    assert "--keep level keeps it in the results" in result.stderr
    for keep in (("--keep", "level", "--keep", "source"), ("--keep", "*")):
        (request,) = requests_of(run(*words, *keep), redis_url)
        assert request.metadata == {"level": "007", "source": "x"}
    result = run(*words, "--keep", "*", "--keep", "nope")
    assert result.exit_code == 2
    assert "no row has a value in the column 'nope'" in result.stderr


def test_values_that_are_kept_become_text(run: Run, redis_url: str) -> None:
    line = '{"prompt": "a", "n_steps": 3, "tags_": ["b"], "none": null, "task": "t"}'
    words = ("submit", "-", "-m", "m", "--keep", "*", "--redis", redis_url)
    (request,) = requests_of(run(*words, input=line), redis_url)
    assert request.metadata == {"n_steps": "3", "tags_": '["b"]', "task": "t"}


def test_a_known_column_that_is_kept_is_not_read(run: Run, redis_url: str) -> None:
    words = ("submit", "-", "-m", "m", "--keep", "text", "--redis", redis_url)
    line = '{"prompt": "a", "text": "b"}'
    (request,) = requests_of(run(*words, input=line), redis_url)
    assert request.messages[0].text == "a"
    assert request.metadata == {"text": "b"}


def test_an_unknown_field_gets_the_fields_that_a_row_may_have(run: Run) -> None:
    result = run("submit", "-", "-m", "m", input='{"prompt": "a", "foo": 1}')
    assert result.exit_code == 2
    for name in ("messages", "prompt", "text", "custom_id", "target", "task"):
        assert name in result.stderr
    assert "'prompt'?" in run("submit", "-", "-m", "m", input='{"promt": "a"}').stderr


def test_errors_in_the_data_show_no_usage_and_no_second_line_number(run: Run) -> None:
    result = run("submit", "-", "-m", "m", input='{"prompt": "a"}\n{"prompt"\n')
    assert result.exit_code == 2
    assert result.stderr == (
        "<stdin>: line 2: not JSON: Expecting ':' delimiter at column 10\n"
        "error: 1 of 2 lines is invalid; nothing was enqueued\n"
    )
    assert "Usage" not in run("submit", "-", "-m", "m", input="").stderr


def test_errors_in_the_data_are_json_with_json(run: Run) -> None:
    result = run("submit", "-", "-m", "m", "--json", input='{"prompt": "a", "foo": 1}')
    assert (result.exit_code, result.stdout) == (2, "")
    error = json.loads(result.stderr)["error"]
    assert error["message"] == "1 of 1 line is invalid; nothing was enqueued"
    assert error["lines"][0].startswith("<stdin>: line 1: unknown field 'foo'")


def test_many_rows_are_submitted_in_their_order(run: Run, redis_url: str) -> None:
    count = 2 * REQUESTS_AT_ONCE + 7
    lines = "\n".join(json.dumps({"prompt": str(i)}) for i in range(count))
    result = run("submit", "-", "-m", "m", "--run", "r", "--redis", redis_url, input=lines)
    found = requests_of(result, redis_url)
    assert [request.messages[0].text for request in found] == [str(i) for i in range(count)]
    assert [request.job.row for request in found] == list(range(count))
    warning, enqueued = result.stderr.splitlines()
    assert warning == (
        "warning: no worker serves 'm' (models served now: none; chatjobs work --model m starts "
        "one): its jobs wait until one does"
    )
    assert enqueued == f"{count} jobs enqueued"
    assert run("submit", "-", "-m", "m", "-q", "--redis", redis_url, input=lines).stderr == ""
    status = run("status", "--redis", redis_url)
    assert status.stderr == (
        "no worker serves 'm' (models served now: none; chatjobs work --model m starts one): its "
        "jobs wait\n"
    )


def test_a_large_file_takes_little_memory(redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for _ in range(40):  # 80 MB
            file.write(json.dumps({"prompt": "a" * 2_000_000}) + "\n")
    code = (
        "import sys\n"
        f"sys.argv = ['chatjobs', 'submit', {str(path)!r}, '-m', 'm', '--redis', {redis_url!r}]\n"
        "from jobs.cli import main\n"
        "try: main()\n"
        "finally: print(open('/proc/self/status').read(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 40
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", done.stderr)
    assert int(peak) < 150_000


def test_a_taken_id_behind_many_rows_refuses_the_whole_file(run: Run, redis_url: str) -> None:
    with Client(redis_url) as client:
        message = {"role": "user", "content": "Hi"}
        client.submit({"model": "m", "messages": [message], "job": {"id": "mine"}})
    rows: list[Any] = [{"prompt": str(i)} for i in range(REQUESTS_AT_ONCE)]
    rows.append({"prompt": "last", "job": {"id": "mine"}})
    lines = "\n".join(map(json.dumps, rows))
    result = run("submit", "-", "-m", "m", "--redis", redis_url, input=lines)
    assert result.exit_code == 2
    assert "line 501: job.id: 'mine' is taken by another job" in result.stderr
    assert "nothing was enqueued" in result.stderr
    assert result.stdout == ""


def test_a_limit_says_how_many_rows_are_enqueued_and_the_file_can_be_sent_again(
    run: Run, redis_url: str
) -> None:
    limit = ("limits", f"jobs={REQUESTS_AT_ONCE}", "--redis", redis_url)
    assert run(*limit).exit_code == 0
    rows = [{"prompt": str(i), "custom_id": str(i)} for i in range(REQUESTS_AT_ONCE + 2)]
    lines = "\n".join(map(json.dumps, rows))
    command = ("submit", "-", "-m", "m", "--redis", redis_url)
    result = run(*command, input=lines)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(
        f"error: <stdin>: line {REQUESTS_AT_ONCE + 1}: the queue of model 'm' is full: "
    )
    assert (
        f"; {REQUESTS_AT_ONCE} of {REQUESTS_AT_ONCE + 2} jobs are enqueued, and their ids are"
        in result.stderr
    )
    assert len(result.stdout.splitlines()) == REQUESTS_AT_ONCE
    assert run("limits", f"jobs={REQUESTS_AT_ONCE + 2}", "--redis", redis_url).exit_code == 0
    again = run(*command, input=lines)
    assert again.stderr.endswith(f"2 jobs enqueued; {REQUESTS_AT_ONCE} jobs existed before\n")


@pytest.mark.parametrize("options", [(), ("--wait",), ("--json",), ("--wait", "--json")])
def test_a_limit_inside_a_chunk_names_the_line_and_prints_the_ids_that_are_enqueued(
    run: Run, redis_url: str, options: tuple[str, ...]
) -> None:
    assert run("limits", "jobs=1", "--redis", redis_url).exit_code == 0
    lines = "\n" + "\n".join(json.dumps({"prompt": str(i), "custom_id": str(i)}) for i in range(3))
    result = run("submit", "-", "-m", "m", *options, "--redis", redis_url, input=lines)
    assert result.exit_code == 1
    error = result.stderr.splitlines()[-1]
    if "--json" in options:
        error = json.loads(error)["error"]["message"]
        (shown,) = [json.loads(line)["id"] for line in result.stdout.splitlines()]
    else:
        (shown,) = result.stdout.split()
    assert "<stdin>: line 3: the queue of model 'm' is full" in error
    assert "; 1 of 3 jobs is enqueued, and its id is on stdout; " in error
    with Client(redis_url) as client:
        assert client.job(shown).status() == "queued"


def test_a_redis_that_may_evict_keys_enqueues_nothing_and_says_so_once(
    run: Run, redis_url: str
) -> None:
    with Client(redis_url) as client:
        client.redis.config_set("maxmemory-policy", "allkeys-lru")
        client.redis.config_set("maxmemory", "1gb")
    try:
        result = run("submit", "-", "-m", "m", "--redis", redis_url, input='{"prompt": "a"}')
    finally:
        with Client(redis_url) as client:
            client.redis.config_set("maxmemory", "0")
            client.redis.config_set("maxmemory-policy", "noeviction")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.endswith("set maxmemory-policy to noeviction; nothing was enqueued\n")
    assert result.stderr.count("enqueued") == 1


def test_the_same_file_in_the_same_run_enqueues_nothing_twice(run: Run, redis_url: str) -> None:
    lines = "\n".join(json.dumps({"prompt": str(i)}) for i in range(20))
    command = ["submit", "-", "-m", "m", "--run", "r", "--redis", redis_url]
    first, second = (run(*command, input=lines) for _ in range(2))
    assert first.stdout == second.stdout
    assert len(set(first.stdout.split())) == 20
    status = json.loads(run("status", "--json", "--redis", redis_url).stdout)
    assert [queue["queued"] for queue in status["queues"]] == [20]
    other = run(*command, input=json.dumps({"prompt": "other"}))
    assert (
        "row 0 of run 'r' is taken by another request: submit these lines with another --run"
        in (other.stderr)
    )
    command[command.index("r")] = "other"
    assert run(*command, input=json.dumps({"prompt": "other"})).exit_code == 0


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    """A Redis, and workers with scripted answers for the model `fake`."""
    found = Site(redis_url, tmp_path / "results")
    yield found
    found.close()


ROWS = (
    {"prompt": "one", "custom_id": "a", "metadata": {"words": "3"}},
    {"prompt": "two", "metadata": {"fail": "out_of_memory"}},
    {"prompt": "[red]three", "metadata": {"words": "100"}},
)
LINES = "\n".join(map(json.dumps, ROWS))


def test_wait_prints_a_table_of_the_results(run: Run, site: Site) -> None:
    site.worker()
    words = ("submit", "-", "-m", "fake", "--wait", "--redis", site.url)
    result = run(*words, input=LINES)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == "3 jobs enqueued"
    assert result.stderr.splitlines()[-1] == "error: 1 of 3 jobs failed or was cancelled"
    header, *rows = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert header == ["line", "custom_id", "job", "status", "tokens", "answer"]
    assert rows[0][:2] == ["1", "a"]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert ["finished" in row for row in rows] == [True, False, True]
    assert "failed" in rows[1]
    assert len(rows[2]) == 4 + 100


def test_wait_with_json_prints_completions_and_errors(run: Run, site: Site) -> None:
    site.worker()
    words = ("submit", "-", "-m", "fake", "--wait", "--json", "-q", "--redis", site.url)
    result = run(*words, input=LINES)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["line"] for one in found] == [1, 2, 3]
    assert [one["status"] for one in found] == ["finished", "failed", "finished"]
    assert found[0]["completion"]["choices"][0]["message"]["content"]
    assert found[0]["error"] is found[1]["completion"] is None
    assert found[1]["error"]["code"] == "out_of_memory"
    (line,) = result.stderr.splitlines()
    assert "1 of 3 jobs failed" in json.loads(line)["error"]["message"]


def test_wait_says_what_it_waits_for_and_what_goes_on(
    spawn: Spawn, redis_url: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(LINES)
    process = spawn("submit", str(path), "-m", "none", "--wait", "--redis", redis_url)
    assert process.stderr is not None
    assert process.stderr.readline() == "3 jobs enqueued\n"
    assert "no worker serves 'none'" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "interrupted; 3 of 3 jobs go on" in err
    assert "Traceback" not in err
    with Client(redis_url) as client:
        assert [client.job(job).status() for job in out.split()] == ["queued"] * 3


def test_a_job_behind_others_says_how_many(spawn: Spawn, site: Site) -> None:
    site.worker(lease_seconds=60.0)
    site.submit_many(["long"] * 40, words=100_000)
    last = site.submit("last")
    wait_until(lambda: any(read_workers(site.redis)))
    process = spawn("follow", last.id, "--redis", site.url)
    assert process.stderr is not None
    notice = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert re.search(rf"job {last.id} is queued behind \d+ other jobs? for 'fake'", notice)


def test_a_job_behind_no_other_is_the_next_one(
    redis_url: str,
) -> None:
    with Client(redis_url) as client:
        publish_worker(client, "m")
        request: Any = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        first, second = (client.submit(request) for _ in range(2))
        notices = [reason(client.connection, job) for job in (first, second)]
    assert notices == [
        f"job {first.id} is the next one for 'm'",
        f"job {second.id} is queued behind 1 other job for 'm'",
    ]


def test_durable_jobs_need_an_append_only_file(run: Run, redis_url: str) -> None:
    line = json.dumps({"prompt": "hi"})
    result = run("submit", "-", "--model", "m", "--durable", "--redis", redis_url, input=line)
    assert result.exit_code == 2
    assert "set appendonly yes" in result.stderr
    with EmbeddedRedis(append_only=True) as server:
        result = run("submit", "-", "--model", "m", "--durable", "--redis", server.url, input=line)
    assert result.exit_code == 0, result.stderr
    assert "1 job enqueued and on disk" in result.stderr


def test_a_stop_string_of_digits_stays_text(run: Run, redis_url: str) -> None:
    words = ("submit", "-", "-m", "m", "-o", "stop=2", "-o", "user=3", "--redis", redis_url)
    (request,) = requests_of(run(*words, input='{"prompt": "a"}'), redis_url)
    assert (request.stop, request.user) == ("2", "3")
