"""The supervisor of `work --devices`, with commands in the place of workers."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.cli.failures import Failure
from tests.waiting import has_ended, wait_until
from worker.cli import supervisor
from worker.cli.device_commands import WorkerCommand
from worker.cli.supervisor import supervise

STOPS_WHEN_TOLD = 'trap "exit 0" TERM INT; touch "$READY"; while :; do sleep 0.1; done'


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(supervisor, "LONGEST_DELAY", 0.04)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Device and process id of each worker that was started."""
    found: list[tuple[str, int]] = []

    class Noted(supervisor._Running):
        def __init__(self, command: WorkerCommand, *args: object, **options: object) -> None:
            super().__init__(command, *args, **options)  # type: ignore[arg-type]
            found.append((command.device, self.pid))

    monkeypatch.setattr(supervisor, "_Running", Noted)
    return found


class Box:
    """Scripts as workers, by device. Files say what they have done."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder

    def ready(self, device: str) -> bool:
        return (self.folder / device).exists()

    def supervise(
        self, grace: float = 60.0, meanwhile: Callable[[], None] = lambda: None, **scripts: str
    ) -> Failure | None:
        """The failure with which it ends. `meanwhile` runs on another thread."""
        commands = [
            WorkerCommand(
                device,
                ("sh", "-c", script),
                {**os.environ, "READY": str(self.folder / device)},
                None,
            )
            for device, script in scripts.items()
        ]
        beside = threading.Thread(target=meanwhile)
        beside.start()
        try:
            supervise(commands, redis_url=self.url, grace=grace, as_json=False)
        except Failure as failure:
            return failure
        finally:
            beside.join()
        return None


@pytest.fixture
def box(redis_url: str, tmp_path: Path) -> Box:
    return Box(redis_url, tmp_path)


Started = list[tuple[str, int]]


@pytest.mark.parametrize("code", [2, 3])
def test_a_worker_that_can_not_start_stops_the_others_and_gives_the_reason(
    box: Box, started: Started, code: int
) -> None:
    script = f'while [ ! -e "{box.folder}/b" ]; do sleep 0.05; done; echo "error: no device" >&2'
    failure = box.supervise(a=f"{script}; exit {code}", b=STOPS_WHEN_TOLD)
    assert failure is not None and failure.exit_code == code
    assert failure.message == "the worker of a can't start: no device"
    assert sorted(device for device, _ in started) == ["a", "b"]
    assert all(has_ended(pid) for _, pid in started)


@pytest.mark.usefixtures("quick")
def test_a_worker_that_dies_before_it_serves_is_given_up(box: Box, started: Started) -> None:
    failure = box.supervise(a="kill -9 $$", b=STOPS_WHEN_TOLD)
    assert failure is not None and failure.exit_code == 1
    assert "the worker of a died 5 times without having served" in failure.message
    assert "signal SIGKILL" in failure.message
    assert sorted(device for device, _ in started) == ["a"] * 5 + ["b"]
    assert all(has_ended(pid) for _, pid in started)


@pytest.mark.usefixtures("quick")
def test_the_delay_doubles_up_to_its_limit(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker.cli.supervisor")
    box.supervise(a="exit 70")
    delays = [text.rpartition(" in ")[2] for text in caplog.messages if "another one" in text]
    assert delays == ["0.01 s", "0.02 s", "0.04 s", "0.04 s"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("steady", "longest"), [(0.0, "0.01 s"), (3600.0, "0.04 s")])
def test_one_that_has_served_is_started_again_for_ever_and_at_once_after_a_while(
    box: Box,
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    steady: float,
    longest: str,
) -> None:
    caplog.set_level(logging.INFO, "worker.cli.supervisor")
    monkeypatch.setattr(supervisor, "STEADY_SECONDS", steady)
    monkeypatch.setattr(supervisor, "LOOK_SECONDS", 0.01)
    served: list[int] = []

    def workers(client: object) -> list[dict[str, object]]:
        served[:] = [pid for _, pid in started]
        return [{"host": socket.gethostname(), "pid": pid} for pid in served]

    monkeypatch.setattr(supervisor, "read_workers", workers)
    take = supervisor.Supervisor._take

    def kill(self: supervisor.Supervisor, event: supervisor.Event) -> None:
        take(self, event)
        if isinstance(event, supervisor._Serves):
            last = len(started) > 2 * supervisor.MOST_FAILURES
            os.kill(os.getpid() if last else event.pid, signal.SIGTERM if last else signal.SIGKILL)

    monkeypatch.setattr(supervisor.Supervisor, "_take", kill)
    assert box.supervise(a="while :; do sleep 0.1; done") is None
    assert len(started) > 2 * supervisor.MOST_FAILURES
    assert [text for text in caplog.messages if "another one" in text][-1].endswith(longest)


def test_one_that_was_told_to_end_stays_away_and_the_others_go_on(
    box: Box, started: Started
) -> None:
    def stop() -> None:
        wait_until(lambda: box.ready("a") and box.ready("b") and len(started) == 2)
        ids = dict(started)
        os.kill(ids["a"], signal.SIGTERM)
        wait_until(lambda: has_ended(ids["a"]))
        assert not has_ended(ids["b"])
        os.kill(ids["b"], signal.SIGTERM)

    assert box.supervise(meanwhile=stop, a=STOPS_WHEN_TOLD, b=STOPS_WHEN_TOLD) is None
    assert [device for device, _ in started] == ["a", "b"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_both_signals_are_handed_down_each_time(box: Box, number: signal.Signals) -> None:
    """A worker ends its jobs after the first one, and itself after the second."""
    name = number.name.removeprefix("SIG")
    twice = (
        f'trap "echo >> $READY.got" {name}; touch "$READY"; '
        'until [ "$(wc -l < $READY.got 2>/dev/null)" = 2 ]; do sleep 0.05; done; exit 1'
    )

    def got(device: str) -> int:
        file = box.folder / f"{device}.got"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def send() -> None:
        wait_until(lambda: box.ready("a") and box.ready("b"))
        os.kill(os.getpid(), number)
        wait_until(lambda: got("a") == got("b") == 1)
        os.kill(os.getpid(), number)

    failure = box.supervise(meanwhile=send, a=twice, b=twice)
    assert failure is not None and failure.exit_code == 1
    assert got("a") == got("b") == 2


def test_workers_that_do_not_stop_in_time_are_killed(
    box: Box, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.2)
    stubborn = 'trap "" TERM; touch "$READY"; while :; do sleep 0.1; done'

    def send() -> None:
        wait_until(lambda: box.ready("a"))
        os.kill(os.getpid(), signal.SIGTERM)

    failure = box.supervise(0.1, send, a=stubborn)
    assert failure is not None and failure.exit_code == 1
    assert all(has_ended(pid) for _, pid in started)


@pytest.mark.parametrize(
    ("codes", "worst"),
    [((0, 0), None), ((0, 1), 1), ((70, 0), 1), ((1, 3), 3), ((3, 2), 2), ((130, 0), 130)],
)
def test_the_exit_code_is_the_worst(box: Box, codes: tuple[int, int], worst: int | None) -> None:
    scripts = [STOPS_WHEN_TOLD.replace("exit 0", f"exit {code}") for code in codes]

    def send() -> None:
        wait_until(lambda: box.ready("a") and box.ready("b"))
        os.kill(os.getpid(), signal.SIGTERM)

    failure = box.supervise(meanwhile=send, a=scripts[0], b=scripts[1])
    assert (None if failure is None else failure.exit_code) == worst


def test_each_line_says_which_device_it_is_of(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    box.supervise(a="echo one; echo two >&2", b=r"printf '1 of 9\r9 of 9\n'")
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line for line in lines if line.startswith("[")) == [
        "[a] one",
        "[a] two",
        "[b] 9 of 9",
    ]
    assert supervisor._with_device('{"level":"info"}', "a", as_json=True) == (
        '{"device":"a","level":"info"}'
    )
    assert supervisor._with_device("{no JSON", "a", as_json=True) == "[a] {no JSON"


def test_a_worker_runs_on_its_cores_and_the_supervisor_on_all(box: Box) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    file = box.folder / "cores"
    words = ("sh", "-c", f"grep Cpus_allowed_list /proc/self/status > {file}")
    one = WorkerCommand(f"cpu:{core}", words, os.environ, frozenset({core}))
    supervise([one], redis_url=box.url, grace=1.0, as_json=False)
    assert file.read_text().split() == ["Cpus_allowed_list:", str(core)]
    assert os.sched_getaffinity(0) == before


def test_cores_that_are_gone_are_a_reason(
    box: Box, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.01)
    one = WorkerCommand("cpu:9999", ("true",), os.environ, frozenset({9999}))
    with pytest.raises(Failure) as caught:
        supervise([one], redis_url=box.url, grace=1.0, as_json=False)
    assert caught.value.exit_code == 3
    assert "the last one did not start (Invalid argument)" in caught.value.message
    assert started == []
