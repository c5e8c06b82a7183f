"""`chatjobs workers` commands running workers, and waits for their answers."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from click.testing import Result

from jobs import JobError, keys
from jobs.cli.workers import _print
from jobs.store import operator
from jobs.store.worker_status import read_workers
from tests.cli.conftest import Run
from tests.worker.site import Site, WorkerProcess, wait_until


def answer(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_paused_worker_claims_no_jobs_until_it_is_resumed(run: Run, site: Site) -> None:
    worker = site.worker(lease_seconds=30.0)  # its status is published for half of that
    site.wait_for_workers()
    (name,) = (one.decode() for one in site.redis.zrange(keys.WORKERS, 0, -1))
    here = ("--json", "--redis", site.url)
    running = site.submit("first", words=100_000)
    wait_until(lambda: running.status().value == "started")
    paused = {"worker": name, "state": "paused", "reason": "paused by an operator"}
    assert answer(run("workers", "pause", name, *here)) == paused | {"running": 1, "error": None}
    waits = site.submit("second")
    (shown,) = answer(run("status", *here))["workers"]
    assert (shown["paused"], shown["jobs"]) == ("paused by an operator", 1)

    late = run("workers", "drain", "--all", "--timeout", "0.1", *here)
    assert late.exit_code == 1
    assert answer(late)["error"]["message"] == f"worker {name} has not done it within 0.1 s"
    twice = (name, name[:-1])  # is commanded once
    assert answer(run("workers", "pause", *twice, *here))["state"] == "paused"
    for words in (("workers", "drain", ""), ("models", "load", "fake", "--worker", "")):
        refused = run(*words, "--redis", site.url)
        assert refused.exit_code == 2 and "worker is empty: chatjobs status" in refused.stderr

    running.cancel()
    drained = run("workers", "drain", name[:-1], "--redis", site.url)  # a name may be shortened
    assert drained.exit_code == 0
    said = f"{name}: claims no jobs, drained by an operator; 0 running jobs"
    assert drained.stderr.splitlines()[-1] == said
    assert waits.status().value == "queued"
    assert answer(run("workers", "resume", name, *here))["state"] == "claiming"
    assert waits.result(timeout=60).text
    assert worker.stop() == 0


def test_a_worker_that_is_gone_is_one_sentence(
    run: Run, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ("--redis", site.url)
    nobody = run("workers", "pause", "--all", *here)
    assert (nobody.exit_code, nobody.stderr) == (1, "error: no worker is running\n")
    worker = site.worker(lease_seconds=2.0)
    site.wait_for_workers()
    (name,) = (one.decode() for one in site.redis.zrange(keys.WORKERS, 0, -1))
    worker.freeze()
    monkeypatch.setattr(operator, "FIRST_ANSWER_SECONDS", 0.1)
    hangs = run("workers", "pause", name, *here)
    assert hangs.exit_code == 1
    gone = (
        f"worker {name} is gone" in hangs.stderr or f"worker {name} does not answer" in hangs.stderr
    )
    assert gone and hangs.stderr.count("\n") == 1
    worker.kill()
    unknown = run("workers", "drain", name, "--json", *here)
    assert unknown.exit_code == 1
    assert answer(unknown)["error"]["code"] in ("not_found", "worker_lost")


def start(site: Site) -> tuple[WorkerProcess, str]:
    """A worker whose status stays published while it is frozen, and its name."""
    worker = site.worker(lease_seconds=30.0)
    site.wait_for_workers()
    (name,) = (one.decode() for one in site.redis.zrange(keys.WORKERS, 0, -1))
    return worker, name


def paused(site: Site) -> str:
    return read_workers(site.redis)[0]["paused"]


def test_while_redis_takes_no_writes_no_command_is_sent(run: Run, site: Site) -> None:
    worker, name = start(site)
    with site.settings(**{"min-replicas-to-write": "1"}):
        refused = run("workers", "pause", name, "--redis", site.url)
        assert refused.exit_code == 3
        assert "takes no writes for now: NOREPLICAS" in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert site.submit().result(timeout=60).text
    assert paused(site) == ""
    assert worker.stop() == 0


def test_an_outage_after_a_command_is_waited_through(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, name = start(site)
    worker.freeze()
    call = operator.send(site.redis, name, "pause", {})
    with site.settings(**{"min-replicas-to-write": "1"}):
        worker.thaw()
        unknown = "was sent to .*; whether it took effect is not known .*NOREPLICAS"
        with pytest.raises(JobError, match=unknown) as caught:
            call.result(timeout=1.0)
        assert caught.value.code == "unavailable"
        monkeypatch.setattr(operator, "OUTAGE_SECONDS", 0.5)
        with pytest.raises(JobError, match=unknown):
            call.result()
        monkeypatch.undo()
        answers: list[Any] = []
        waits = threading.Thread(target=lambda: answers.append(call.result()))
        waits.start()
        time.sleep(3.0)
    waits.join()
    assert [one["state"] for one in answers] == ["paused"]
    assert worker.stop() == 0


def test_a_worker_that_subscribes_again_receives_the_command(
    run: Run, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, name = start(site)
    here = ("--json", "--redis", site.url)
    worker.freeze()
    assert site.redis.client_kill_filter(_type="pubsub")
    monkeypatch.setattr(operator, "RETURN_SECONDS", 0.5)
    error = answer(run("workers", "pause", name, *here))["error"]
    assert error["code"] == "unavailable"
    assert f"worker {name} does not listen to commands now" in error["message"]
    monkeypatch.undo()
    thaws = threading.Timer(2.0, worker.thaw)
    thaws.start()
    assert answer(run("workers", "pause", name, *here))["state"] == "paused"
    thaws.join()
    assert worker.stop() == 0


def test_a_worker_of_a_full_redis_takes_commands_and_goes_on(run: Run, site: Site) -> None:
    worker, name = start(site)
    waits = site.submit(words=200)
    with site.settings(maxmemory="1"):
        paused = answer(run("workers", "pause", name, "--json", "--redis", site.url))
        assert paused["state"] == "paused"
        resumed = answer(run("workers", "resume", name, "--json", "--redis", site.url))
        assert resumed["state"] == "claiming"
        assert waits.result(timeout=60).text
    assert worker.stop() == 0


def test_the_timeout_counts_from_the_command_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 1000, 4))
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    silent: Any = Silent()
    calls = [operator.Call(silent, name, "c") for name in ("a", "b", "c")]  # at 0, 4 and 8
    for call in calls:
        with pytest.raises(JobError, match="has not done it within 9 s"):
            call.result(timeout=9)
    assert silent.looks == 3


class Silent:
    """A Redis in which workers live and do not answer."""

    looks = 0

    def blpop(self, names: Any, timeout: float) -> None:
        self.looks += 1

    def pipeline(self, transaction: bool) -> Silent:
        return self

    def zscore(self, *_: Any) -> None: ...

    def time(self) -> None: ...

    def execute(self) -> Any:
        return 1e6, (1, 0)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "w: unknown; running jobs unknown"),
        ({"state": "paused"}, "w: paused; running jobs unknown"),
        ({"reason": "", "running": 1}, "w: claims jobs; 1 running job"),
    ],
)
def test_an_answer_of_another_version_is_shown_as_far_as_it_goes(
    capsys: pytest.CaptureFixture[str], facts: dict[str, Any], said: str
) -> None:
    _print("w", facts)
    assert capsys.readouterr().err.strip() == said
