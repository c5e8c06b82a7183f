"""Output of commands on terminals and in pipes, in any encoding and with any text."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs import Client, JobError, keys
from jobs.api.params import RequestFields
from jobs.log_lines import LogFormatter
from tests.cli.conftest import COMMAND, Show, Stream
from tests.jobs.conftest import StepwiseWorker

# A window title, a cleared screen, a C1 sequence, an override of the direction, a rubout.
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eb\u2066\x7f😀é"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202eb\\u2066\\x7f😀é"
OURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")  # colours, and the cursor of progress bars
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u202a-\u202e\u2066-\u2069]")
ENCODINGS = ("latin-1", "cp1252", "ascii")


@pytest.fixture
def worker(redis_url: str) -> Iterator[StepwiseWorker]:
    worker = StepwiseWorker(redis_url)
    yield worker
    worker.redis.close()


@pytest.fixture
def world(
    show: Show, redis_url: str, worker: StepwiseWorker, finished_run: Path
) -> dict[str, tuple[str, ...]]:
    """Commands by name, all of which write HOSTILE."""
    redis = ("--redis", redis_url)
    rows = finished_run / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "hi", "custom_id": HOSTILE}) + "\n")
    submit = ("submit", str(rows), "-m", "m\u2066", "--run", "r", *redis)
    with Client(redis_url) as client:
        client.serving = None
        request: RequestFields = {
            "model": "m\u2066",
            "messages": [{"role": "user", "content": HOSTILE}],
        }
        for name in ("done", "fails"):
            client.submit({**request, "job": {"id": name}})
            worker.start(name)
        worker.write("done", 1, 1, f"{HOSTILE}\nnext\t", reasoning=HOSTILE)
        worker.finish("done", f"{HOSTILE}\nnext\t", reasoning=HOSTILE)
        worker.fail("fails", JobError("internal", HOSTILE))
        show(*submit, "-q")
        (row,) = client.redis.lrange("rq:queue:bulk:m\u2066", 0, -1)
        worker.start(row.decode())
        worker.finish(row.decode(), HOSTILE)
    published = dict.fromkeys(("host", "device", "paused"), HOSTILE) | {
        "name": HOSTILE,
        "models": [HOSTILE],
        "names": [HOSTILE],
        "memory": {"weights": 1, "cache": 1},
        "running": 1,
        "tokens_per_second": 1,
    }
    worker.redis.zadd(keys.WORKERS, {HOSTILE: 1e13})
    worker.redis.set(keys.worker(HOSTILE), json.dumps(published))
    (part,) = (finished_run / "r1/samples").iterdir()
    table = pq.read_table(part)
    model = table.schema.get_field_index("model")
    hostile = [HOSTILE] * table.num_rows
    pq.write_table(table.set_column(model, table.schema.field(model), [hostile]), part)
    results = ("--results", str(finished_run))
    return {
        "submit --wait": (*submit, "--wait"),
        "submit --wait --json": (*submit, "--wait", "--json"),
        "submit": ("submit", str(rows), "-m", HOSTILE, *redis),
        "submit --json": ("submit", str(rows), "-m", "m", "--json", *redis),
        "submit, no file": ("submit", HOSTILE),
        "follow": ("follow", "done", *redis),
        "follow --json": ("follow", "done", "--json", *redis),
        "follow, failed": ("follow", "fails", *redis),
        "follow, failed, --json": ("follow", "fails", "--json", *redis),
        "follow, no job": ("follow", HOSTILE),
        "chat": ("chat", "-m", HOSTILE, "hi", *redis),
        "chat -o": ("chat", "-m", "m", "-o", HOSTILE, "hi"),
        "jobs list": ("jobs", "list", *redis),
        "jobs list --json": ("jobs", "list", "--json", *redis),
        "jobs show": ("jobs", "show", "fails", *redis),
        "jobs show --json": ("jobs", "show", "fails", "--json", *redis),
        "jobs cancel": ("jobs", "cancel", HOSTILE),
        "status": ("status", *redis),
        "status --json": ("status", "--json", *redis),
        "status --host": ("status", "--host", f"no{HOSTILE}", *redis),
        "limits": ("limits", HOSTILE, *redis),
        "results": ("results", "r1", *results),
        "results --json": ("results", "r1", "--json", *results),
        "results, no run": ("results", f"no{HOSTILE}", *results),
        "compact, no run": ("results", "compact", f"no{HOSTILE}", *results, *redis),
        "models check": ("models", "check", f"./{HOSTILE}"),
        "prompts save": ("prompts", "save", "-m", "m", "--system", HOSTILE, "-o", "x"),
        "no command": (HOSTILE,),
        "no option": ("status", f"--{HOSTILE}"),
    }


def parsed(line: str) -> Any:
    return json.loads(line) if line.startswith("{") else None


def strings(value: Any) -> Iterator[str]:
    """The texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def test_control_characters_are_visible_on_terminals_in_every_command(
    show: Show, world: dict[str, tuple[str, ...]]
) -> None:
    for name, words in world.items():
        shown = show(*words, terminal=True, columns=1000)
        text = shown.out + shown.err
        assert "\x1b[2J" not in text, name
        assert not CONTROL.search(OURS.sub("", text)), (name, text)
        if "--json" in name:
            found = [one for line in text.splitlines() for one in strings(parsed(line))]
            assert any(HOSTILE in one for one in found), (name, text)
        elif "r'" not in name:
            assert "\\x1b]0;owned\\x07" in text, (name, text)


def test_newlines_and_tabs_of_an_answer_stay(show: Show, world: dict[str, tuple[str, ...]]) -> None:
    shown = show(*world["follow"], terminal=True)
    assert f"{SHOWN}\nnext\t\n" in shown.out


def test_a_pipe_gets_an_answer_as_it_is(show: Show, world: dict[str, tuple[str, ...]]) -> None:
    shown = show(*world["follow"])
    assert shown.out == f"{HOSTILE}\nnext\t\n"
    assert HOSTILE in shown.err  # the reasoning
    assert HOSTILE in show(*world["follow, failed"]).err


def test_a_progress_bar_on_the_terminal_keeps_the_output_in_its_file(
    show: Show, world: dict[str, tuple[str, ...]]
) -> None:
    shown = show(*world["submit --wait --json"], terminal=True, piped=True)
    (line,) = shown.out.splitlines()
    assert json.loads(line)["custom_id"] == HOSTILE
    assert "1/1" in shown.err
    assert "custom_id" not in shown.err
    both = show(*world["submit --wait --json"], terminal=True)
    assert json.loads(both.out) == json.loads(line)
    assert "1/1" not in both.err


@pytest.mark.parametrize("terminal", [False, True])
def test_no_command_fails_on_the_encoding_of_its_output(
    show: Show, world: dict[str, tuple[str, ...]], terminal: bool
) -> None:
    for name, words in world.items():
        plain = show(*words, encoding="utf-8", terminal=terminal)
        assert "Unicode" not in plain.err, (name, plain)
        for encoding in ENCODINGS:
            shown = show(*words, encoding=encoding, terminal=terminal)
            assert shown.code == plain.code, (name, shown)
            assert "Unicode" not in shown.err, (name, shown)
            for stream in ("out", "err"):
                before, now = (
                    [one for line in getattr(text, stream).splitlines() if (one := parsed(line))]
                    for text in (plain, shown)
                )
                assert len(before) == len(now), (name, shown)
            for line in (shown.out + shown.err).splitlines():
                assert not parsed(line) or line.isascii(), (name, line)


def test_characters_that_an_encoding_lacks_are_escapes(
    show: Show, world: dict[str, tuple[str, ...]]
) -> None:
    assert "\\U0001f600é" in show(*world["follow"], encoding="latin-1").out
    assert "\\U0001f600\\xe9" in show(*world["follow"], encoding="ascii").out


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "cp1252:strict"},
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
)
def test_a_process_in_any_locale_prints_an_answer_and_its_json(
    world: dict[str, tuple[str, ...]], environment: dict[str, str]
) -> None:
    for name in ("follow", "follow --json"):
        done = subprocess.run(
            [COMMAND, *world[name]], env={**os.environ, **environment}, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        assert b"owned" in done.stdout
        if "--json" in name:
            (*_, last) = done.stdout.splitlines()
            assert json.loads(last)["choices"][0]["message"]["content"].startswith(HOSTILE)


def test_a_question_that_is_not_text_in_its_encoding_is_named(redis_url: str) -> None:
    words = (COMMAND, "chat", "-m", "m", "--wait", "0", "--redis", redis_url, "-")
    question, utf = "Grüße".encode("latin-1"), {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(words, input=question, env={**os.environ, **utf}, capture_output=True)
    assert done.returncode == 2
    assert b"stdin is not text in utf-8: invalid start byte at byte 2" in done.stderr
    for remedy in ({"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "cp1252"}):
        done = subprocess.run(
            words, input=question, env={**os.environ, **remedy}, capture_output=True
        )
        assert b"no worker serves 'm'" in done.stderr and b"wait longer" in done.stderr


def test_log_lines_on_a_terminal_show_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("worker", logging.ERROR, "f", 1, "job %s\nnext", (HOSTILE,), None)
    for terminal, shown in ((True, SHOWN), (False, HOSTILE)):
        monkeypatch.setattr(sys, "stderr", Stream("utf-8", terminal))
        assert (
            LogFormatter("%(levelname)s %(message)s").format(record) == f"ERROR job {shown}\nnext"
        )
