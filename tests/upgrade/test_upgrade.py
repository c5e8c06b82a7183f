"""What version 0.1.0 (commit e363a82) has left in Redis and in files is read and carried on.

record.py has made the folder e363a82 with the code of that commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from click.testing import CliRunner

from jobs import JobError
from jobs.api.answer import ChatCompletion
from jobs.api.chunk import ChatChunk
from jobs.cli import build
from jobs.embedded import EmbeddedRedis
from tests.upgrade import contents, redis_text
from tests.worker.site import PATIENCE, Site

RECORDED = Path(__file__).with_name("e363a82")
ENDED = ("finished", "streamed", "written-0", "written-1", "unwritten-0", "unwritten-1")


def command(*words: str) -> str:
    result = CliRunner().invoke(build(), words)
    assert result.exit_code == 0, result.output
    return result.stdout


def cached(answer: ChatCompletion) -> int:
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens


def said(message: Any) -> str:
    """Reasoning and answer of a message, or of a part of one: the demo model reasons first."""
    return (message.reasoning_content or "") + (message.content or "")


def streamed(chunks: list[ChatChunk], choice: int = 0) -> str:
    parts = [part for chunk in chunks for part in chunk.choices if part.index == choice]
    return "".join(said(part.delta) for part in parts)


def load(url: str, folder: Path) -> Site:
    copytree(RECORDED, folder)
    site = Site(url, folder / "results")
    redis_text.load(site.redis, folder / "redis.jsonl")
    return site


def rows(site: Site, run: str) -> dict[tuple[str, int], Any]:
    return {(row["job_id"], row["choice_index"]): row for row in site.rows(run)}


@pytest.fixture
def old(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    """The state as it was recorded."""
    site = load(redis_url, tmp_path / "old")
    yield site
    site.close()


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The state after a worker of today has served it until nothing waited."""
    folder = tmp_path_factory.mktemp("upgraded") / "old"
    with EmbeddedRedis() as server:
        site = load(server.url, folder)
        command("jobs", "requeue", "cancelled", "--redis", server.url)
        messages = [
            {"role": "system", "content": contents.CACHED},
            {"role": "user", "content": "Rain?"},
        ]
        request: Any = {**contents.chat("begins-with-the-cache"), "messages": messages}
        site.client.submit(request)
        options = ["--model", "demo", "--device", "cpu", "--dtype", "bf16", "--redis", server.url]
        files = ["--results", str(site.folder), "--state-dir", str(folder / "states")]
        files += ["--prompt-cache", str(folder / "prompt.safetensors")]
        command("work", *options, *files, "--burst", "--quiet")
        yield site
        site.close()


# --- read without a worker ------------------------------------------------------------------------


def test_clients_read_results_and_errors(old: Site) -> None:
    for name in ENDED:
        assert said(old.client.job(name).result(timeout=PATIENCE).choices[0].message)
    assert len(old.client.job("written-0").result(timeout=PATIENCE).choices) == 2
    with pytest.raises(JobError, match="prompt has 2012 tokens") as caught:
        old.client.job("too-long").result(timeout=PATIENCE)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(JobError) as caught:
        old.client.job("cancelled").result(timeout=PATIENCE)
    assert caught.value.code == "cancelled"


@pytest.mark.parametrize("name", ENDED)
def test_clients_read_streams_that_have_ended(old: Site, name: str) -> None:
    job = old.client.job(name)
    chunks = list(job.stream(timeout=PATIENCE))
    answer = job.result(timeout=PATIENCE)
    for choice in answer.choices:
        assert streamed(chunks, choice.index) == said(choice.message)


def test_clients_read_the_part_of_an_open_stream(old: Site) -> None:
    stream = old.client.job("open").stream(timeout=PATIENCE)
    assert streamed([next(stream) for _ in range(5)])


def test_a_session_has_its_turns(old: Site) -> None:
    session = old.client.session("talk")
    asked = [turn.messages[0]["content"] for turn in session.turns()]
    assert asked == list(contents.TURNS[:2])
    assert session.history()[0] == {"role": "system", "content": contents.SESSION}


def test_the_rows_of_a_run_are_read_and_compacted(old: Site) -> None:
    before = rows(old, "written")
    assert {key: row["status"] for key, row in before.items()} == {
        ("written-0", 0): "ok",
        ("written-0", 1): "ok",
        ("written-1", 0): "ok",
        ("too-long", 0): "error",
        ("cancelled", 0): "cancelled",
    }
    for (name, choice), row in before.items():
        if row["status"] == "ok":
            answer = old.client.job(name).result(timeout=PATIENCE)
            assert row["reasoning"] == answer.choices[choice].message.reasoning_content
    assert len(old.results.files("written")) == 2
    command("results", "compact", "written", "--results", str(old.folder), "--redis", old.url)
    assert len(old.results.files("written")) == 1
    assert rows(old, "written") == before


def test_commands_show_jobs_queues_and_rows_and_find_nothing_damaged(old: Site) -> None:
    found = json.loads(command("status", "--json", "--redis", old.url))
    assert found["damaged"] == []
    assert found["rows"]["runs"] == {"planned": 2, "unwritten": 2}
    lengths = {queue["name"]: queue for queue in found["queues"]}
    chat = {name: lengths["chat:demo"][name] for name in ("queued", "scheduled", "deferred")}
    assert chat == {"queued": 8, "scheduled": 1, "deferred": 2}
    assert lengths["bulk:demo"]["queued"] == 1 + len(contents.FILE)
    listed = command("jobs", "list", "--json", "--redis", old.url).splitlines()
    states = {one["id"]: one["status"] for one in map(json.loads, listed)}
    assert states["too-long"] == "failed"
    assert states["acme-2"] == states["bulk"] == "queued"
    assert json.loads(command("limits", "--json", "--redis", old.url))["tenant_running:acme"] == 1


def test_jobs_that_wait_are_cancelled_and_the_same_file_is_not_enqueued_twice(
    old: Site, tmp_path: Path
) -> None:
    for name in ("queued", "bulk", "acme-3", "scheduled", "of-rq-dependent"):
        assert old.client.job(name).cancel()
        assert old.client.job(name).status() == "cancelled"
    before = old.redis.lrange("rq:queue:bulk:demo", 0, -1)
    file = contents.write_file(tmp_path)
    command("submit", str(file), "--model", "demo", "--run", "file", "--redis", old.url)
    assert old.redis.lrange("rq:queue:bulk:demo", 0, -1) == before


# --- after a worker -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [one["job"]["id"] for one in contents.WAITING] + [*contents.RQ])
def test_jobs_that_waited_have_run(upgraded: Site, name: str) -> None:
    assert said(upgraded.client.job(name).result(timeout=PATIENCE).choices[0].message)


def test_a_job_whose_time_to_live_has_passed_fails(upgraded: Site) -> None:
    with pytest.raises(JobError, match="ttl of 1 s"):
        upgraded.client.job("expired").result(timeout=PATIENCE)


def test_all_jobs_have_rows_also_those_of_the_outbox(upgraded: Site) -> None:
    expected = [one["job"]["id"] for one in contents.WAITING]
    assert [name for name, _ in sorted(rows(upgraded, "waiting"))] == sorted(expected)
    for run in ("unwritten", "planned"):  # of the second one, a worker had planned a file
        assert sorted(name for name, _ in upgraded.written(run)) == [f"{run}-0", f"{run}-1"]
    statuses = {row["status"] for run in ("waiting", "unwritten") for row in upgraded.rows(run)}
    assert statuses == {"ok"}
    assert len(rows(upgraded, "file")) == len(contents.FILE)
    assert not list(upgraded.redis.scan_iter("chatjobs:outbox*"))
    assert not list(upgraded.redis.scan_iter("chatjobs:parts*"))


def test_the_job_of_a_worker_that_was_killed_runs_again_and_its_stream_goes_on(
    upgraded: Site,
) -> None:
    job = upgraded.client.job("open")
    answer = job.result(timeout=PATIENCE)
    assert answer.usage is not None and answer.usage.completion_tokens == 200
    assert rows(upgraded, "default")["open", 0]["attempt"] == 2
    assert list(job.stream(timeout=PATIENCE, on_restart="reset"))


def test_a_cancelled_job_is_requeued_and_its_row_replaced(upgraded: Site) -> None:
    row = rows(upgraded, "written")["cancelled", 0]
    assert (row["status"], row["attempt"]) == ("ok", 2)


def test_the_session_goes_on_with_the_state_in_its_file(upgraded: Site) -> None:
    turns = upgraded.client.session("talk").turns()
    assert [turn.messages[0]["content"] for turn in turns] == list(contents.TURNS)
    answers = [upgraded.client.job(turn.job).result(timeout=PATIENCE) for turn in turns]
    assert cached(answers[2]) >= 64


def test_the_prompt_cache_is_used(upgraded: Site) -> None:
    answer = upgraded.client.job("begins-with-the-cache").result(timeout=PATIENCE)
    assert cached(answer) >= 16


def test_nothing_waits_any_more(upgraded: Site) -> None:
    assert not list(upgraded.redis.scan_iter("rq:queue:*"))
    assert not list(upgraded.redis.scan_iter("rq:wip:*"))
    assert not list(upgraded.redis.scan_iter("rq:deferred:*"))
    assert not list(upgraded.redis.scan_iter("chatjobs:tenant*"))
