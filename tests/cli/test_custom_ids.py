"""`chatjobs submit`: custom_id identifies a row, and a file is enqueued whole or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jobs import Client, keys
from jobs.client.rq_format import job_key
from tests.cli.conftest import Run
from tests.cli.test_jobs import client, worker
from tests.jobs.conftest import StepwiseWorker

__all__ = ["client", "worker"]

QUEUE = "rq:queue:bulk:m"
NOTHING = "nothing was enqueued"


def prompts(**contents: str) -> str:
    """Lines by their custom_ids."""
    return "\n".join(
        json.dumps({"custom_id": name, "prompt": prompt}) for name, prompt in contents.items()
    )


def batch(**contents: str) -> str:
    """Lines of an OpenAI batch file, by their custom_ids."""

    def line(name: str, prompt: str) -> dict[str, Any]:
        body = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
        target = {"method": "POST", "url": "/v1/chat/completions"}
        return {"custom_id": name, **target, "body": body}

    return "\n".join(json.dumps(line(name, prompt)) for name, prompt in contents.items())


@pytest.fixture(params=[prompts, batch])
def lines(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def command(redis_url: str) -> list[str]:
    return ["submit", "-", "-m", "m", "--redis", redis_url]


def queued(client: Client, queue: str = QUEUE) -> int:
    return int(client.redis.llen(queue))


def rows_of(client: Client, ids: list[str]) -> list[int | None]:
    return [client.job(name).request.job.row for name in ids]


def test_a_line_that_is_put_before_the_others_is_enqueued_alone(
    run: Run, client: Client, command: list[str], lines: Any
) -> None:
    words = [*command, "--run", "r"]
    first = run(*words, input=lines(a="one", b="two")).stdout.split()
    longer = run(*words, input=lines(z="new", a="one", b="two"))
    assert longer.exit_code == 0, longer.stderr
    assert longer.stderr.endswith("1 job enqueued; 2 jobs existed before\n")
    new, *same = longer.stdout.split()
    assert same == first
    assert queued(client) == 3
    assert rows_of(client, [*first, new]) == [0, 1, 2]


def test_a_file_in_another_order_or_without_some_lines_is_the_same_rows(
    run: Run, client: Client, command: list[str], lines: Any
) -> None:
    words = [*command, "--run", "r"]
    a, b, c = run(*words, input=lines(a="one", b="two", c="three")).stdout.split()
    assert rows_of(client, [a, b, c]) == [0, 1, 2]
    other = run(*words, input=lines(c="three", a="one"))
    assert other.stdout.split() == [c, a]
    assert other.stderr.endswith("0 jobs enqueued; 2 jobs existed before\n")
    assert queued(client) == 3


def test_rows_that_ended_are_known_by_their_custom_id(
    run: Run, client: Client, worker: StepwiseWorker, command: list[str], lines: Any
) -> None:
    words = [*command, "--run", "r"]
    (job,) = run(*words, input=lines(a="one")).stdout.split()
    worker.start(job)
    worker.finish(job, "x")
    client.redis.delete(job_key(job))
    again = run(*words, input=lines(z="new", a="one"))
    assert again.stderr.endswith("1 job enqueued; 1 was done before: its row is in run r\n")


def test_a_changed_line_refuses_the_whole_file_and_another_run_takes_it(
    run: Run, client: Client, command: list[str], lines: Any
) -> None:
    words = [*command, "--run", "r"]
    run(*words, input=lines(a="one", b="two"))
    changed = lines(z="new", a="one", b="TWO")
    refused = run(*words, input=changed)
    assert refused.exit_code == 2
    assert "line 3" in refused.stderr
    assert "custom_id 'b': row 1 of run 'r' is that of another request" in refused.stderr
    assert refused.stderr.endswith(f"1 of 3 lines is refused; {NOTHING}\n")
    assert queued(client) == 2
    assert run(*command, "--run", "s", input=changed).stderr.endswith("3 jobs enqueued\n")
    assert run(*words, input=lines(z="new", a="one", b2="TWO")).exit_code == 0


def test_a_taken_id_or_row_refuses_the_whole_file(
    run: Run, client: Client, command: list[str]
) -> None:
    run(*command, input='{"prompt": "one", "job": {"id": "mine"}}')
    refused = run(*command, input='{"prompt": "new"}\n{"prompt": "x", "job": {"id": "mine"}}')
    assert "line 2" in refused.stderr and NOTHING in refused.stderr
    assert queued(client, "rq:queue:chat:m") == 1
    words = [*command, "--run", "r"]
    run(*words, input='{"prompt": "one"}')
    refused = run(*words, input='{"prompt": "zero"}\n{"prompt": "one"}')
    assert "line 1: job.row: row 0 of run 'r' is taken" in refused.stderr.replace("<stdin>: ", "")
    assert NOTHING in refused.stderr
    assert queued(client) == 1


def test_a_custom_id_that_occurs_twice_in_a_run_is_refused(
    run: Run, client: Client, command: list[str]
) -> None:
    twice = f"{prompts(a='one')}\n{prompts(a='two')}"
    refused = run(*command, "--run", "r", input=twice)
    assert refused.exit_code == 2
    assert "line 1 of the file has 'a' as well" in refused.stderr
    assert queued(client) == 0


def test_without_a_run_a_line_that_is_sent_twice_is_one_job(
    run: Run, client: Client, command: list[str], lines: Any
) -> None:
    first = run(*command, input=lines(a="one", b="two"))
    again = run(*command, input=lines(z="new", a="one", b="changed"))
    assert again.stderr.endswith("2 jobs enqueued; 1 job existed before\n")
    assert again.stdout.split()[1] == first.stdout.split()[0]
    assert queued(client, "rq:queue:chat:m") == 4


def test_without_a_run_lines_without_a_custom_id_are_new_jobs(
    run: Run, client: Client, command: list[str]
) -> None:
    for _ in range(2):
        assert run(*command, input='{"prompt": "one"}').stderr.endswith("1 job enqueued\n")
    assert queued(client, "rq:queue:chat:m") == 2


def test_a_run_of_an_older_version_is_known_or_refused_but_never_done_twice(
    run: Run, client: Client, command: list[str], lines: Any
) -> None:
    words = [*command, "--run", "r"]
    first = run(*words, input=lines(a="one", b="two"))
    for name in client.redis.scan_iter("chatjobs:custom-ids:*"):  # which it did not write
        client.redis.delete(name)
    client.redis.delete(keys.next_row("r"))
    assert NOTHING in run(*words, input=lines(z="new", a="one", b="two")).stderr
    assert run(*words, input=lines(a="one", b="two")).stdout == first.stdout
    assert run(*words, input=lines(z="new", a="one", b="two")).exit_code == 0
    assert queued(client) == 3


def test_rows_with_and_without_a_custom_id_share_a_run(
    run: Run, client: Client, command: list[str]
) -> None:
    words = [*command, "--run", "r"]
    mixed = f'{prompts(a="one")}\n{{"prompt": "two"}}\n{prompts(c="three")}'
    ids = run(*words, input=mixed).stdout.split()
    assert rows_of(client, ids) == [0, 1, 2]
    assert run(*words, input=mixed).stdout.split() == ids
    more = run(*words, input=prompts(d="four", e="five")).stdout.split()
    assert rows_of(client, more) == [3, 4]


def test_many_custom_ids_take_little_memory(run: Run, client: Client, command: list[str]) -> None:
    count = 2000
    text = prompts(**{f"request-{number}": "x" for number in range(count)})
    assert run(*command, "--run", "r", input=text).exit_code == 0
    names = list(client.redis.scan_iter("chatjobs:custom-ids:*"))
    sizes = [client.redis.memory_usage(name, samples=0) or 0 for name in names]
    assert sum(sizes) / count <= 160  # bytes per row, as docs/limits.md says
    assert all(int(client.redis.ttl(name)) > 0 for name in [*names, keys.next_row("r")])


def test_a_full_redis_gives_no_row_and_says_so(
    run: Run, client: Client, command: list[str]
) -> None:
    client.redis.config_set("maxmemory", "1kb")
    try:
        refused = run(*command, "--run", "r", input=prompts(a="one"))
    finally:
        client.redis.config_set("maxmemory", "0")
    assert refused.exit_code == 1
    assert "Redis is full" in refused.stderr
    assert run(*command, "--run", "r", input=prompts(a="one")).exit_code == 0
