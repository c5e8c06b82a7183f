"""Every command prints JSON with --json, in the form that docs/commands.md describes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from jobs import Client, JobError, RequestFields
from jobs.cli import build
from tests.cli.conftest import Run
from tests.jobs.conftest import StepwiseWorker

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
LOGS = ("work", "record", "serve")  # commands whose output is log lines
REQUEST: RequestFields = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def table() -> dict[str, str]:
    """The third column of the table by the commands in the first one."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            commands, _, keys = line.strip("| ").split(" | ")
            found.update(dict.fromkeys(re.findall("`(.*?)`", commands), keys))
    return found


def documented(command: str, unit: str = "line") -> set[str]:
    """The keys of a command's objects."""
    keys = set(re.findall("`(.*?)`", table()[command]))
    return keys - {"line", "row"} | ({unit} if {"line", "row"} <= keys else set())


def commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def test_every_command_has_json_and_is_documented() -> None:
    pages = {"results" if name == "results RUN" else name for name in table()}
    for name, command in commands(build()):
        options = {option for one in command.params for option in one.opts}
        without = name in {*LOGS, "lm-eval"}
        assert ("--json" in options) != without, name
        assert without or name.removesuffix(" show") in pages or name in pages, name


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as client:
        client.serving = None
        yield client


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("command", "status", "then"),
    [
        ("cancel", "queued", "cancelled"),
        ("jobs cancel", "queued", "cancelled"),
        ("jobs requeue", "failed", "queued"),
        ("jobs purge", "failed", None),
    ],
)
def test_commands_that_change_jobs_print_each_job_and_exit_with_1_if_one_was_not_changed(
    run: Run, client: Client, redis_url: str, command: str, status: str, then: str | None
) -> None:
    worker = StepwiseWorker(redis_url)
    names = ["a", "b", "c", "d"]
    for name in names:
        client.submit({**REQUEST, "job": {"id": name, "run": "r"}})
    client.submit({**REQUEST, "job": {"id": "done"}})
    worker.start("done")
    worker.finish("done", "x")
    if status == "failed":
        for name in names:
            worker.start(name)
            worker.fail(name, JobError("internal", "x"))
    worker.redis.close()
    words = (*command.split(), "--json", "--redis", redis_url)
    given = run(*words, "a", "nobody", "b")
    first, second, third = objects(given.stdout)
    assert [set(one) for one in (first, second, third)] == [documented(command)] * 3
    assert first == {"id": "a", "done": True, "status": then, "error": None}
    assert (second["id"], second["done"], second["status"]) == ("nobody", False, None)
    assert second["error"]["code"] == "not_found"
    assert third["done"]
    assert given.exit_code == 1
    assert json.loads(given.stderr.splitlines()[-1])["error"]["message"].startswith("1 of 3 jobs")
    found = run(*words, "--run", "r", "--state", status)
    assert sorted(one["id"] for one in objects(found.stdout)) == ["c", "d"]
    assert (found.exit_code, found.stderr) == (0, "")
    ended = run(*words, "done")
    (one,) = objects(ended.stdout)
    if command == "jobs purge":
        assert (one["done"], one["status"], ended.exit_code) == (True, None, 0)
    elif command == "jobs requeue":
        assert (one["done"], one["status"], ended.exit_code) == (False, "finished", 1)
        assert one["error"]["message"] == "done: not requeued, it is finished"
    else:
        assert (one["done"], one["status"], ended.exit_code) == (True, "finished", 0)


def test_objects_have_the_keys_of_the_documentation(
    run: Run, client: Client, redis_url: str, finished_run: Path
) -> None:
    client.submit({**REQUEST, "job": {"id": "a"}})
    redis, results = ("--redis", redis_url), ("--results", str(finished_run))
    line = '{"prompt": "hi"}'
    for command, words in {
        "submit": ("submit", "-", "-m", "m", *redis),
        "jobs list": ("jobs", "list", *redis),
        "jobs show": ("jobs", "show", "a", *redis),
        "status": ("status", *redis),
        "results": ("results", *results),
        "results compact": ("results", "compact", "r1", *results, *redis),
        "models check": ("models", "check", "demo"),
    }.items():
        done = run(*words, "--json", input=line)
        assert done.exit_code == 0, (command, done.output)
        (found, *_) = objects(done.stdout)
        assert set(found) == documented(command), command
    assert objects(run("limits", "--json", *redis).stdout)[0]["jobs"]


def test_submit_wait_prints_outcomes(run: Run, client: Client, redis_url: str) -> None:
    worker = StepwiseWorker(redis_url)
    words = ("submit", "-", "-m", "m", "--run", "r", "--redis", redis_url)
    line = '{"prompt": "hi"}'
    job = run(*words, input=line).stdout.strip()
    worker.start(job)
    worker.finish(job, "x")
    worker.redis.close()
    (found,) = objects(run(*words, "--wait", "--json", input=line).stdout)
    assert set(found) == documented("submit --wait")
