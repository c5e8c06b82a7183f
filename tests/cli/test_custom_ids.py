"""`chatjobs submit`: custom_id identifies a row, and a file is enqueued whole or not at all."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from jobs import Client, keys
from jobs.store.custom_ids import FileRows
from jobs.store.rq_layout import job_key
from tests.cli.conftest import Run, Spawn
from tests.cli.test_jobs import client, worker
from tests.jobs.conftest import StepwiseWorker

__all__ = ["client", "worker"]

QUEUE = "rq:queue:bulk:m"
NOTHING = "nothing was enqueued"
PATIENCE = 120.0  # seconds


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


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        (prompts(a="one"), "row 0 of run 'r' is that of a request"),
        (batch(a="one"), "row 0 of run 'r' is that of a request"),
        ('{"prompt": "one"}', "row 0 of run 'r' is taken by a request"),
        ('{"prompt": "one", "job": {"id": "a"}}', "'a' is taken by a job"),
    ],
)
def test_a_file_that_was_submitted_for_another_model_is_told_so(
    run: Run, client: Client, worker: StepwiseWorker, command: list[str], text: str, taken: str
) -> None:
    words = [*command, "--run", "r"]
    assert run(*words, "-m", "other", input=text).exit_code == 0
    refused = run(*words, input=text)
    assert refused.exit_code == 2
    assert f"{taken} that differs only in its model, 'other'" in refused.stderr
    assert NOTHING in refused.stderr and queued(client) == 0
    changed = run(*words, input=text.replace("one", "ONE"))
    assert "differs only" not in changed.stderr and "another" in changed.stderr
    assert run(*command, "--run", "s", input=text.replace('"a"', '"b"')).exit_code == 0


def test_a_row_that_another_model_has_written_is_known_when_its_job_has_left_redis(
    run: Run, client: Client, worker: StepwiseWorker, command: list[str]
) -> None:
    words = [*command, "--run", "r"]
    (job,) = run(*words, input=prompts(a="one")).stdout.split()
    worker.start(job)
    worker.finish(job, "x")
    client.redis.delete(job_key(job))
    refused = run(*words, "-m", "other", input=prompts(a="one"))
    assert "a request that differs only in its model, 'm'" in refused.stderr


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


def removed(client: Client) -> None:
    """As after `rq empty` of the queue."""
    for name in client.redis.lrange(QUEUE, 0, -1):
        client.redis.delete(job_key(name.decode()))
    client.redis.delete(QUEUE)


def test_a_line_without_a_custom_id_that_has_moved_refuses_the_whole_file(
    run: Run, client: Client, command: list[str]
) -> None:
    words = [*command, "--run", "r"]
    run(*words, input=f'{prompts(a="one")}\n{{"prompt": "two"}}')
    moved = f'{prompts(z="new", a="one")}\n{{"prompt": "two"}}'
    refused = run(*words, input=moved)
    assert refused.exit_code == 2
    assert "line 3: " in refused.stderr
    assert "row 2 of run 'r'" in refused.stderr and "another --run" in refused.stderr
    assert refused.stderr.endswith(f"1 of 3 lines is refused; {NOTHING}\n")
    assert queued(client) == 2
    assert run(*command, "--run", "s", input=moved).stderr.endswith("3 jobs enqueued\n")
    appended = f'{prompts(a="one")}\n{{"prompt": "two"}}\n{prompts(z="new")}'
    assert run(*words, input=appended).stderr.endswith("1 job enqueued; 2 jobs existed before\n")


def test_a_run_whose_rows_have_custom_ids_takes_no_file_without(
    run: Run, client: Client, command: list[str]
) -> None:
    words = [*command, "--run", "r"]
    run(*words, input=prompts(a="one"))
    without = '{"prompt": "one"}\n{"prompt": "two"}'
    refused = run(*words, input=without)
    assert refused.exit_code == 2
    assert "line 1: " in refused.stderr and "row 0 of run 'r' is taken" in refused.stderr
    assert NOTHING in refused.stderr and queued(client) == 1
    assert run(*command, "--run", "s", input=without).stderr.endswith("2 jobs enqueued\n")


def test_a_run_whose_rows_have_no_custom_ids_takes_no_file_with_them(
    run: Run, client: Client, command: list[str], lines: Any
) -> None:
    words = [*command, "--run", "r"]
    run(*words, input='{"prompt": "one"}')
    refused = run(*words, input=lines(a="one", b="two"))
    assert refused.exit_code == 2
    assert "custom_id 'a': row 0 of run 'r' is that of another request" in refused.stderr
    assert NOTHING in refused.stderr and queued(client) == 1
    assert run(*command, "--run", "s", input=lines(a="one", b="two")).exit_code == 0


def test_a_line_takes_no_row_that_a_custom_id_of_the_same_file_has(
    run: Run, client: Client, command: list[str]
) -> None:
    """Its job was removed before it ran, so that the row alone is free for a corrected line."""
    words = [*command, "--run", "r"]
    run(*words, input=prompts(a="one"))
    removed(client)
    both = f'{{"prompt": "two"}}\n{prompts(a="one")}'
    refused = run(*words, input=both)
    assert refused.exit_code == 2 and NOTHING in refused.stderr
    assert "line 2: " in refused.stderr
    assert queued(client) == 0
    assert run(*words, input=both.replace('"a"', '"b"')).exit_code == 0


def test_two_lines_of_one_row_are_refused_unless_a_custom_id_moves(
    run: Run, client: Client, command: list[str]
) -> None:
    first, second = (
        json.dumps({"prompt": name, "job": {"run": "r", "row": 1}}) for name in ("one", "two")
    )
    refused = run(*command, input=f"{first}\n{second}")
    assert refused.exit_code == 2
    assert "line 2: " in refused.stderr and "row 1 of run 'r'" in refused.stderr
    assert NOTHING in refused.stderr
    assert queued(client, "rq:queue:chat:m") == 0
    assert run(*command, "--run", "s", input=f"{first}\n{second}").exit_code == 0
    second = json.dumps({"custom_id": "a", "prompt": "two", "job": {"run": "r"}})
    both = run(*command, input=f"{first}\n{second}")
    assert rows_of(client, both.stdout.split()) == [1, 2]
    assert run(*command, input=f"{first}\n{second}").stdout == both.stdout


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_files_is_enqueued_whole_or_not_at_all(
    run: Run, client: Client, command: list[str], seed: int
) -> None:
    chance = random.Random(seed)
    words = [*command, "--run", "r"]
    for _ in range(8):
        names = chance.sample("abcdefgh", chance.randint(1, 6))
        text = "\n".join(
            json.dumps(
                {"custom_id": name, "prompt": name} if chance.random() < 0.6 else {"prompt": name}
            )
            for name in names
        )
        before = queued(client)
        found = run(*words, input=text)
        if found.exit_code == 0:
            rows = rows_of(client, found.stdout.split())
            assert len(set(rows)) == len(names)
        else:
            assert found.exit_code == 2 and NOTHING in found.stderr, found.stderr
            assert not found.stdout and queued(client) == before
        if chance.random() < 0.3:
            removed(client)


def test_files_that_are_submitted_to_a_run_at_once_have_their_own_rows(
    spawn: Spawn, client: Client, command: list[str], tmp_path: Path
) -> None:
    command.remove("-")
    started = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(prompts(**{f"{name}{number}": "x" for number in range(700)}))
        started.append(spawn(*command, "--run", "r", str(path)))
    ends = [one.communicate(timeout=PATIENCE) for one in started]
    assert [one.returncode for one in started] == [0, 0], ends
    rows = rows_of(client, [name for out, _ in ends for name in out.split()])
    assert len(set(rows)) == 1400


def test_rows_that_another_submit_takes_during_the_check_are_passed_over(
    run: Run, client: Client, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, give, others = [*command, "--run", "r"], FileRows.give, []

    def give_before_others(self: FileRows, requests: Any) -> Any:
        found = give(self, requests)
        if not others:
            others.append(prompts(**{f"b{number}": "x" for number in range(700)}))
            assert run(*words, input=others[0]).exit_code == 0
        return found

    monkeypatch.setattr(FileRows, "give", give_before_others)
    found = run(*words, input=prompts(**{f"a{number}": "x" for number in range(700)}))
    assert found.exit_code == 0, found.stderr
    assert set(rows_of(client, found.stdout.split())) == set(range(700, 1400))


def test_custom_ids_whose_rows_another_submit_takes_meanwhile_get_others(
    run: Run, client: Client, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, try_submit, others = [*command, "--run", "r"], Client.try_submit, []

    def submit_after_others(self: Client, *args: Any, **options: Any) -> Any:
        if not others:
            others.append(prompts(x="first", b="two", y="third"))
            assert run(*words, input=others[0]).exit_code == 0
        return try_submit(self, *args, **options)

    monkeypatch.setattr(Client, "try_submit", submit_after_others)
    found = run(*words, input=prompts(a="one", b="two", c="three"))
    assert found.exit_code == 0, found.stderr
    assert found.stderr.endswith("2 jobs enqueued; 1 job existed before\n")
    assert rows_of(client, found.stdout.split()) == [3, 1, 4]
    assert queued(client) == 5


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
