"""systemd loads the shipped units, and their commands and time limits are those of chatjobs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jobs.record.process import STOP_SECONDS
from jobs.store.connection.connect import URL_VARIABLE
from tests.deploy.command_line import DEPLOY, config_of, options_of
from worker.queue.lease_keeper import EXIT_HUNG

FOLDER = DEPLOY / "systemd"
WORKER, RECORDER = "chatjobs-worker@.service", "chatjobs-recorder.service"
UNITS = [WORKER, RECORDER]
CONFIG = "/etc/chatjobs/%i.toml"
# The settings of systemd 247 or newer that the units may use; a typing error is none of them.
KNOWN = {
    "Unit": {"Description", "Wants", "After", "StartLimitIntervalSec"},
    "Install": {"WantedBy"},
    "Service": {
        *("Type", "User", "Group", "Environment", "EnvironmentFile", "ExecStart", "KillMode"),
        *("TimeoutStopSec", "Restart", "RestartSec", "RestartPreventExitStatus", "OOMPolicy"),
        *("StateDirectory", "CacheDirectory", "UMask", "NoNewPrivileges", "CapabilityBoundingSet"),
        *("ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "ProtectClock"),
        *("ProtectProc", "ProtectHostname", "ProtectKernelTunables", "ProtectKernelModules"),
        *("ProtectKernelLogs", "ProtectControlGroups", "RestrictAddressFamilies"),
        *("RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "LockPersonality"),
        "SystemCallArchitectures",
    },
}


def settings(unit: str) -> dict[str, dict[str, list[str]]]:
    """The values of each setting of a unit, by section."""
    found: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in (FOLDER / unit).read_text("utf-8").splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = header[1]
            found[section] = {}
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found[section].setdefault(name, []).append(value)
    return found


def value(unit: str, name: str) -> str:
    (found,) = settings(unit)["Service"][name]
    return found


def options(unit: str) -> dict[str, Any]:
    """The options that the unit gives to chatjobs. An environment variable in it is expanded, as
    systemd does."""
    line = value(unit, "ExecStart")
    for one in settings(unit)["Service"].get("Environment", []):
        name, _, text = one.partition("=")
        line = line.replace(f"${{{name}}}", text)
    program, *words = shlex.split(line)
    assert program.endswith("/bin/chatjobs")
    return options_of(words, {CONFIG: DEPLOY / "worker.toml"})


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_has_known_settings_only(unit: str) -> None:
    for section, names in settings(unit).items():
        assert names.keys() <= KNOWN[section], section


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_loads_a_unit_without_a_word(unit: str, tmp_path: Path) -> None:
    """With a program that exists, as the installed one does."""
    text = (FOLDER / unit).read_text("utf-8").replace("/opt/chatjobs/bin/chatjobs", "/bin/true")
    path = tmp_path / unit.replace("@", "@small")
    path.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True
    )
    said = [line for line in done.stderr.splitlines() if "chatjobs" in line]
    assert (done.returncode, said) == (0, []), done.stderr


def test_a_worker_has_time_for_its_jobs_and_rows_before_it_is_killed() -> None:
    found = options(WORKER)
    assert found["command"] == "work"
    assert int(value(WORKER, "TimeoutStopSec")) > found["grace"] + 3 + 20
    assert value(WORKER, "KillMode") == "mixed"


def test_a_recorder_has_time_for_the_rows_in_redis_before_it_is_killed() -> None:
    assert options(RECORDER)["command"] == "record"
    assert int(value(RECORDER, "TimeoutStopSec")) > STOP_SECONDS + 3


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_starts_again_after_each_exit_that_a_restart_can_help(unit: str) -> None:
    assert value(unit, "Restart") == "on-failure"  # 1, 3, EXIT_HUNG and signals, not 0
    prevented = {int(code) for code in value(unit, "RestartPreventExitStatus").split()}
    assert prevented == {2} and EXIT_HUNG not in prevented
    assert settings(unit)["Unit"]["StartLimitIntervalSec"] == ["0"]


def test_each_worker_has_a_file_of_models_and_a_port_of_its_own() -> None:
    assert options(WORKER)["config"] == DEPLOY / "worker.toml"
    assert config_of(DEPLOY / "worker.toml").models[0].model == "demo"
    assert options(WORKER)["http"] == ("127.0.0.1", 9100)
    assert "-/etc/chatjobs/%i.env" in settings(WORKER)["Service"]["EnvironmentFile"]


@pytest.mark.parametrize("unit", UNITS)
def test_the_url_of_redis_is_in_a_file_and_not_in_the_command_line(unit: str) -> None:
    assert "/etc/chatjobs/chatjobs.env" in settings(unit)["Service"]["EnvironmentFile"]
    assert "--redis" not in value(unit, "ExecStart")
    assert f"\n{URL_VARIABLE}=redis://" in (FOLDER / "chatjobs.env").read_text("utf-8")


def test_a_unit_hides_no_gpu() -> None:
    assert (
        not {"PrivateDevices", "ProtectClock", "DeviceAllow"} & settings(WORKER)["Service"].keys()
    )
