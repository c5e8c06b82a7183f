"""`work --devices`: what is refused before a process starts, and the command of each worker."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from tests.cli.conftest import Run
from worker.cli import device_commands
from worker.cli.device_commands import WorkerCommand, worker_commands
from worker.cli.work import work

DEVICES = "work -m demo --devices"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def commands(*words: str) -> list[WorkerCommand]:
    with click.Context(work), work.make_context("work", ["-m", "demo", *words]) as context:
        given = context.params
        return worker_commands(
            context,
            given["devices"],
            memory=given["memory"],
            host_memory=given["host_memory"],
            http=given["http"],
            log_format="json",
        )


def option(command: WorkerCommand, name: str) -> list[str]:
    return [word.partition("=")[2] for word in command.words if word.startswith(f"{name}=")]


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        ("cuda:0,cuda:0", "'cuda:0' is given twice: a device is for one worker or rank"),
        ("cpu,cpu", "'cpu' is given twice"),
        ("cpu:0-3,cpu:2-5", "'cpu:0-3' and 'cpu:2-5' overlap in cores 2-3: give each core to one"),
        ("cpu:1,cpu:0-1", "'cpu:1' and 'cpu:0-1' overlap in core 1: "),
        ("cpu:0,cpu", "'cpu' takes all cores, also those of 'cpu:0'"),
        ("cpu:6-9", "'cpu:6-9' needs cores 8-9, which this process may not use; it may use 0-7"),
        ("cpu:99", "'cpu:99' needs core 99, which this process may not use"),
        ("cpu:3-1", "'cpu:3-1' has no cores: give the lower number first"),
        ("auto", "'auto' is not a device: give cuda:N, cpu, or cpu:A-B for the cores"),
        ("cuda", "'cuda' is not a device"),
        ("cuda:01", "'cuda:01' is not a device"),
        ("cpu:0,", "'' is not a device"),
        ("cpu:0, cpu:1", "' cpu:1' is not a device"),
        ("", "'' is not a device"),
    ],
)
def test_devices_that_can_not_be_are_refused_in_one_sentence(
    run: Run, devices: str, sentence: str
) -> None:
    result = run(*DEVICES.split(), devices)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert len([line for line in result.stderr.splitlines() if "rror" in line]) == 1


def test_device_together_with_devices_is_refused(run: Run) -> None:
    result = run(*DEVICES.split(), "cpu:0,cpu:1", "--device", "cpu")
    assert result.exit_code == 2
    assert "--device is for one worker and --devices for several: give one" in result.stderr


def test_a_port_beyond_the_highest_is_refused_before_redis_is_asked(run: Run) -> None:
    result = run(*DEVICES.split(), "cpu:0,cpu:1", "--http", "65535")
    assert result.exit_code == 2
    assert "the worker of device 2 would listen at port 65536, and the highest is" in result.stderr


def test_a_redis_that_is_away_is_one_line_and_no_worker_starts(run: Run) -> None:
    result = run(*DEVICES.split(), "cpu:0,cpu:1")
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert "127.0.0.1:1" in result.stderr


def test_each_worker_has_its_device_its_cores_and_the_other_options() -> None:
    first, second, third = commands(
        *("-m", "other", "--devices", "cpu:0-2,cpu:4,cuda:1", "--no-preempt", "--burst"),
        *("--grace", "7", "--results", "-odd"),
    )
    for one, device in ((first, "cpu"), (second, "cpu"), (third, "cuda:1")):
        assert one.words[1] == "work"
        assert option(one, "--device") == [device]
        assert option(one, "--model") == ["demo", "other"]
        assert {"--no-preempt", "--burst"} <= set(one.words)
        assert (option(one, "--grace"), option(one, "--results")) == (["7.0"], ["-odd"])
        assert not option(one, "--redis") and not option(one, "--max-batch")
        options = work.make_context("work", list(one.words[2:])).params
        assert (options["device"], options["devices"]) == (device, ())
    assert [one.cores and set(one.cores) for one in (first, second, third)] == [
        {0, 1, 2},
        {4},
        None,
    ]
    threads = [one.environment.get(device_commands.THREADS) for one in (first, second, third)]
    assert threads == ["3", "1", os.environ.get(device_commands.THREADS)]


def test_workers_on_the_cpu_share_a_percentage_and_each_has_a_size() -> None:
    shares = commands("--devices", "cpu:0,cpu:1,cpu:2,cuda:0", "--memory", "90%")
    assert [option(one, "--memory") for one in shares] == [["30%"], ["30%"], ["30%"], ["90%"]]
    sizes = commands("--devices", "cpu:0,cpu:1", "--memory", "2GiB")
    assert [option(one, "--memory") for one in sizes] == [[str(2**31)]] * 2


def test_each_worker_has_a_port() -> None:
    def ports(address: str) -> list[list[str]]:
        made = commands("--devices", "cpu:0,cpu:1", "--http", address)
        return [option(one, "--http") for one in made]

    assert ports("9100") == [["127.0.0.1:9100"], ["127.0.0.1:9101"]]
    assert ports("[::]:9100") == [["[::]:9100"], ["[::]:9101"]]
    assert ports("0") == [["127.0.0.1:0"]] * 2  # any free one


def test_the_budget_of_a_config_is_shared_as_well(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "worker.toml"
    config.write_text('memory = "60%"\ndevice = "cuda:7"\n[[models]]\nmodel = "demo"\n')
    made: list[WorkerCommand] = []

    def note(*args: object, **options: object) -> list[WorkerCommand]:
        made.extend(worker_commands(*args, **options))  # type: ignore[arg-type]
        return made

    monkeypatch.setattr("worker.cli.work.worker_commands", note)
    assert run("work", "--config", str(config), "--devices", "cpu:0,cpu:1").exit_code == 3
    assert [option(one, "--memory") for one in made] == [["30%"], ["30%"]]
    assert [option(one, "--device") for one in made] == [["cpu"], ["cpu"]]
    assert [option(one, "--config") for one in made] == [[str(config)]] * 2


def test_host_memory_is_the_machine_s_for_all_workers_together() -> None:
    found = commands("--devices", "cuda:0,cuda:1", "--memory", "90%", "--host-memory", "50%")
    assert [option(one, "--host-memory") for one in found] == [["25%"], ["25%"]]
    found = commands("--devices", "cpu:0-3,cpu:4-7", "--memory", "1GiB", "--host-memory", "1GiB")
    assert [option(one, "--host-memory") for one in found] == [[str(2**30)], [str(2**30)]]
