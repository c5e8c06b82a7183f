"""`chatjobs limits` shows and sets what all producers and workers obey."""

from __future__ import annotations

import json

import pytest

from jobs import Client, JobError
from jobs.store.limits import DEFAULTS
from tests.cli.conftest import Run

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_limits_are_shown_with_their_defaults(run: Run, redis_url: str) -> None:
    shown = json.loads(run("limits", "--json", "--redis", redis_url).stdout)
    assert shown == DEFAULTS._asdict()
    assert f"jobs            {DEFAULTS.jobs}" in run("limits", "--redis", redis_url).stdout


def test_producers_obey_a_limit_that_is_set(run: Run, redis_url: str) -> None:
    result = run("limits", "-m", "one", "jobs=0", "--json", "--redis", redis_url)
    assert json.loads(result.stdout)["jobs:one"] == 0
    with Client(redis_url) as client:
        with pytest.raises(JobError) as caught:
            client.submit({"model": "one", "messages": MESSAGES})
        assert caught.value.code == "queue_full"
        client.submit({"model": "two", "messages": MESSAGES})
        result = run("limits", "-m", "one", "jobs=default", "--json", "--redis", redis_url)
        assert json.loads(result.stdout) == DEFAULTS._asdict()
        client.submit({"model": "one", "messages": MESSAGES})


def test_a_limit_of_one_is_named_in_the_singular(run: Run, redis_url: str) -> None:
    assert run("limits", "-m", "one", "jobs=1", "--redis", redis_url).exit_code == 0
    with Client(redis_url) as client, pytest.raises(JobError) as caught:
        client.submit_many([{"model": "one", "messages": MESSAGES}] * 2)
    assert "it has 1 job that has not ended, and the limit (jobs) is 1" in caught.value.message
    assert caught.value.message.endswith("; 1 of 2 requests is enqueued")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["jobs"], "'jobs': a limit is set as NAME=N or NAME=default"),
        (["jobs=many"], "'jobs=many': a limit is set as NAME=N"),
        (["pages=3"], "there is no limit 'pages': the limits are jobs, bytes, request_bytes"),
        (["-m", "x", "row_bytes=3"], "row_bytes is the same for all models"),
        (["-m", "", "jobs=3"], "model: a name has at least one character"),
        (["--tenant", "", "tenant_running=3"], "tenant: a name has at least one character"),
        (["-m", "a\udcff", "jobs=3"], "model: 'a\\udcff' is not valid UTF-8"),
        (["jobs=" + "9" * 5000], "jobs: a limit is at most 9007199254740992"),
    ],
)
def test_a_wrong_limit_is_refused(run: Run, redis_url: str, words: list[str], message: str) -> None:
    result = run("limits", *words, "--redis", redis_url)
    assert result.exit_code == 2
    assert message in result.stderr


def test_nothing_is_set_if_one_of_the_limits_is_wrong(run: Run, redis_url: str) -> None:
    result = run("limits", "jobs=5", "pages=3", "--redis", redis_url)
    assert result.exit_code == 2
    shown = json.loads(run("limits", "--json", "--redis", redis_url).stdout)
    assert shown == DEFAULTS._asdict()


def test_a_limit_of_a_model_that_nobody_knows_is_set_with_a_warning(
    run: Run, redis_url: str
) -> None:
    with Client(redis_url) as client:
        client.serving = None
        client.submit({"model": "demo", "messages": MESSAGES})
    words = ("jobs=5", "--json", "--redis", redis_url)
    assert run("limits", "-m", "demo", *words).stderr == ""
    result = run("limits", "-m", "demoo", *words)
    assert json.loads(result.stdout)["jobs:demoo"] == 5
    assert result.stderr == (
        "warning: no worker serves 'demoo' (models served now: none; chatjobs work --model demoo "
        "starts one), and it has no jobs; did you mean 'demo'?\n"
    )


def test_foreign_values_are_the_default(run: Run, redis_url: str) -> None:
    with Client(redis_url) as client:
        client.serving = None
        digits = "9" * 5000
        values = {"jobs:one": "1.5", "jobs": "-1", "bytes": "nan", "row_bytes": digits}
        for name, value in values.items():
            client.redis.hset("chatjobs:limits", name, value)
        client.redis.hset("chatjobs:limits", "jobs:two", digits)
        client.redis.hset("chatjobs:tenant-jobs", "chat:one", "1.5")
        for _ in range(2):
            client.submit({"model": "one", "messages": MESSAGES})
        assert run("status", "--redis", redis_url).exit_code == 0
        client.redis.hset("chatjobs:limits", "jobs:one", 2)
        with pytest.raises(JobError, match=r"not ended, and the limit \(jobs\) is 2"):
            client.submit({"model": "one", "messages": MESSAGES})
        client.redis.hdel("chatjobs:limits", "jobs:one", "jobs:two")
    shown = json.loads(run("limits", "--json", "--redis", redis_url).stdout)
    assert shown == DEFAULTS._asdict()
