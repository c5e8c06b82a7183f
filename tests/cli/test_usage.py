"""Wrong usage exits with 2 and says what is possible; with --json, errors are JSON on stderr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs import Client
from tests.cli.conftest import UNREACHABLE, Run


@pytest.mark.parametrize("words", ["work -m demo", "models check demo"])
@pytest.mark.parametrize("device", ["gpu", "tpu", "mps", "cuda:x", "cuda:-1", ""])
def test_an_unknown_device_exits_with_2(run: Run, words: str, device: str) -> None:
    result = run(*words.split(), "--device", device)
    assert result.exit_code == 2
    assert f"{device!r} is not a device: auto, cpu, cuda or cuda:N" in result.stderr


def test_the_help_of_results_names_each_command_in_one_line(run: Run) -> None:
    out = run("results", "--help").stdout
    assert out.startswith("Usage: chatjobs results [OPTIONS] [RUN] | COMMAND\n")
    lines = out.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == ["compact", "query", "rm", "show"]
    assert all(line.endswith((".",)) and not line.endswith("...") for line in lines)


def test_a_seed_of_more_than_64_bits_is_refused(run: Run, tmp_path: Path) -> None:
    for seed in (2**63, -(2**63) - 1):
        result = run("run", str(tmp_path), "--seed", str(seed))
        assert result.exit_code == 2
        assert f"{seed} is not an integer of 64 bits" in result.stderr
    assert str(2**63 - 1) not in run("run", "--help").stdout


def test_an_invalid_job_id_exits_with_2(run: Run) -> None:
    result = run("follow", "a b")
    assert result.exit_code == 2
    assert "'a b' is not a job id" in result.stderr


def test_a_missing_results_folder_exits_with_2(run: Run, tmp_path: Path) -> None:
    for words in (("results",), ("results", "r1")):
        result = run(*words, "--results", str(tmp_path / "nope"))
        assert result.exit_code == 2
        assert f"no folder {tmp_path / 'nope'}" in result.stderr
        assert "--results" in result.stderr


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_question_exits_with_2(run: Run, text: str) -> None:
    assert run("chat", "-m", "demo", text).exit_code == 2
    result = run("chat", "-m", "demo", "-", input=text)
    assert result.exit_code == 2
    assert "the question is empty" in result.stderr


@pytest.mark.parametrize(
    "words", ["chat -m demo hi", "submit - -m demo", "status", "follow j", "cancel j"]
)
def test_a_private_redis_is_refused_where_nothing_would_serve_it(run: Run, words: str) -> None:
    result = run(*words.split(), "--redis", "embedded", input='{"prompt": "a"}')
    assert result.exit_code == 2
    assert "chatjobs work --model M --redis embedded" in result.stderr
    assert "'embedded'" not in run(words.split()[0], "--help").stdout


def test_an_unknown_option_of_the_redis_url_is_named(run: Run) -> None:
    result = run("status", "--redis", "redis://me:secret@h/0?foo=hidden")
    assert result.exit_code == 2
    assert "unknown option 'foo'" in result.stderr
    assert "secret" not in result.output
    assert "hidden" not in result.output


def error_of(stderr: str) -> dict[str, Any]:
    """The JSON error, which is the only line."""
    (line,) = stderr.splitlines()
    error = json.loads(line)["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return dict(error)


@pytest.mark.parametrize(
    ("words", "code", "kind", "name"),
    [
        ("status --json", 3, "server_error", "unavailable"),
        ("status --json --nope", 2, "invalid_request_error", "invalid_request"),
        ("follow --json a/b", 2, "invalid_request_error", "invalid_request"),
        ("chat --json hi", 2, "invalid_request_error", "invalid_request"),
        ("statsu --json", 2, "invalid_request_error", "invalid_request"),
        ("models check ./nope --json", 3, "invalid_request_error", "model_not_found"),
        ("results r2 --json --results /", 2, "invalid_request_error", "invalid_request"),
    ],
)
def test_errors_are_json_with_json(run: Run, words: str, code: int, kind: str, name: str) -> None:
    result = run(*words.split())
    assert (result.exit_code, result.stdout) == (code, "")
    error = error_of(result.stderr)
    assert (error["type"], error["code"]) == (kind, name)


def test_the_error_of_a_job_is_json_with_json(run: Run, redis_url: str) -> None:
    result = run("chat", "-m", "no", "--wait", "0", "-q", "--json", "--redis", redis_url, "hi")
    assert result.exit_code == 1
    error = error_of(result.stderr)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_a_wrong_field_of_a_question_is_named_in_json(run: Run) -> None:
    error = error_of(run("chat", "-m", "m", "--json", "-o", "top_p=3", "hi").stderr)
    assert (error["code"], error["param"]) == ("invalid_request", "top_p")


def test_a_host_without_worker_has_a_code_of_its_own(run: Run, redis_url: str) -> None:
    result = run("status", "--host", "x", "--json", "--redis", redis_url)
    assert result.exit_code == 1
    error = error_of(result.stderr)
    assert (error["code"], error["message"]) == ("not_found", "no worker is running on host x")


def test_a_question_that_looks_like_the_option_gets_no_json(run: Run) -> None:
    result = run("chat", "-m", "demo", "--redis", UNREACHABLE, "--", "--json")
    assert result.stderr.startswith("error: can't reach Redis")


def test_messages_have_no_internal_prefix(run: Run, redis_url: str) -> None:
    result = run("follow", "never-was", "--redis", redis_url)
    assert result.stderr.startswith("error: no job 'never-was' in Redis")
    assert run("results", "r2", "--results", "/").stderr.startswith("error: no run 'r2'")


def test_cancel_says_what_happened(run: Run, redis_url: str) -> None:
    with Client(redis_url) as client:
        job = client.submit({"model": "m", "messages": [{"role": "user", "content": "Hi"}]})
        assert run("cancel", job.id, "--redis", redis_url).stderr == f"{job.id}: cancelled\n"
        again = run("cancel", job.id, "--redis", redis_url)
        assert (again.exit_code, again.stderr) == (0, f"{job.id}: already cancelled\n")


def test_cancel_is_the_same_command_below_jobs(run: Run, redis_url: str) -> None:
    with Client(redis_url) as client:
        client.serving = None
        for words in (["cancel"], ["jobs", "cancel"]):
            request: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
            one, *more = client.submit_many([request] * 3)
            result = run(*words, one.id, "--redis", redis_url)
            assert (result.exit_code, result.stderr) == (0, f"{one.id}: cancelled\n")
            result = run(*words, "--state", "queued", "--redis", redis_url)
            assert (result.exit_code, result.stderr) == (0, "2 jobs cancelled\n")
            assert {job.status() for job in more} == {"cancelled"}


def test_a_limit_of_state_files_without_a_folder_is_wrong_usage(run: Run) -> None:
    result = run("work", "-m", "demo", "--state-bytes", "5")
    assert result.exit_code == 2 and "--state-bytes needs --state-dir" in result.stderr


def test_a_wait_for_models_without_a_budget_is_wrong_usage(run: Run) -> None:
    result = run("work", "-m", "demo", "--max-wait", "5")
    assert result.exit_code == 2 and "--max-wait needs --memory" in result.stderr


@pytest.mark.parametrize(
    ("option", "setter"),
    [
        ("priority=bulk", "--priority"),
        ("job.priority=bulk", "--priority"),
        ("job.run=r", "--run"),
        ("job.id=a", "--run, --priority, --tenant, --delay and FILE"),
    ],
)
def test_a_field_of_the_job_names_the_option_of_submit(run: Run, option: str, setter: str) -> None:
    done = run("submit", "-", "-m", "m", "-o", option, input='{"prompt": "a"}')
    assert done.exit_code == 2
    assert f"{option.partition('=')[0]} is set by {setter}" in done.stderr


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("priority=bulk", 'job={"priority": "bulk"}'),
        ("job.priority=bulk", 'job={"priority": "bulk"}'),
        ("stream_options.include_usage=true", 'stream_options={"include_usage": true}'),
    ],
)
def test_a_field_inside_a_field_is_told_the_option_that_chat_takes(
    run: Run, option: str, remedy: str
) -> None:
    words = ("chat", "-m", "m", "Hi")
    refused = run(*words, "-o", option)
    assert refused.exit_code == 2
    assert f"-o '{remedy}'" in " ".join(refused.stderr.split())
    assert run(*words, "-o", remedy).exit_code == 3  # no Redis: the option is taken


@pytest.mark.parametrize("words", ["status", "chat -m demo hi", "work -m demo"])
def test_an_error_about_the_url_names_its_source(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    given = " ".join(run(*words.split(), "--redis", "foo").stderr.split())
    assert "Invalid value for '--redis': the Redis URL has no scheme: the form is redis://" in given
    monkeypatch.setenv("CHATJOBS_REDIS_URL", "foo")
    done = run(*words.split())
    assert done.exit_code == 2
    assert "Invalid value for $CHATJOBS_REDIS_URL: the Redis URL has no scheme" in done.stderr


def test_a_private_redis_is_refused_with_its_source(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = run("status", "--redis", "embedded")
    assert "Invalid value for '--redis': a private Redis" in typed.stderr
    monkeypatch.setenv("CHATJOBS_REDIS_URL", "embedded")
    assert "Invalid value for $CHATJOBS_REDIS_URL: a private" in run("status").stderr


def test_without_redis_a_command_names_what_works_without_it(run: Run) -> None:
    work, chat, status = (run(*w.split()) for w in ("work -m demo", "chat -m demo hi", "status"))
    assert work.exit_code == chat.exit_code == status.exit_code == 3
    assert "or start a private one with --redis embedded" in work.stderr
    assert "or answer in this process with --local" in chat.stderr
    assert status.stderr.endswith("with --redis URL\n")
