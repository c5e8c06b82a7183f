"""Every Lua script is documented in its header, compiles, and takes what Python passes to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.commands.core import CoreCommands

from jobs import lua
from jobs.store import (
    backlog,
    claim,
    enqueue,
    job_end,
    leases,
    maintenance,
    operator,
    part_plans,
    presence,
    producer_lease,
    purge,
    recorders,
    requeue,
    responses,
    results_folder,
    rights,
    run_rows,
    sessions,
    stream,
    turns,
    wake_lists,
    workers,
)
from jobs.store.preludes import (
    AFFINITY_LUA,
    DELETE_JOB_LUA,
    DEPENDENTS_LUA,
    JOB_END_LUA,
    LEASE_LUA,
    LONGER_LUA,
    QUEUE_LUA,
    RESERVATIONS_LUA,
    STATUSES_LUA,
    STREAM_END_LUA,
    TENANT_RUNNING_LUA,
    TURNS_LUA,
)

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(
    path for package in ("jobs", "worker") for path in ROOT.glob(f"{package}/**/scripts/*.lua")
)

# The text of each script, a table that it unpacks, and the names that Python gives its elements.
CASES: list[tuple[str, str, Any]] = [
    (enqueue.ENQUEUE, "KEYS", enqueue.EnqueueKeys),
    (enqueue.ENQUEUE, "ARGV", enqueue.EnqueueArgs),
    (enqueue.ENQUEUE, "keys", enqueue.JobKeys),
    (enqueue.ENQUEUE, "args", enqueue.JobArgs),
    (JOB_END_LUA, "keys", job_end.EndKeys),
    (JOB_END_LUA, "args", job_end.EndArgs),
    (job_end.CANCEL, "KEYS", job_end.CancelKeys),
    (job_end.CANCEL, "ARGV", job_end.CancelArgs),
    (requeue.REQUEUE, "KEYS", requeue.RequeueKeys),
    (requeue.REQUEUE, "ARGV", requeue.RequeueArgs),
    (purge.PURGE, "KEYS", purge.PurgeKeys),
    (purge.PURGE, "ARGV", purge.PurgeArgs),
    (DELETE_JOB_LUA, "keys", purge.DeleteJobKeys),
    (DELETE_JOB_LUA, "args", purge.DeleteJobArgs),
    (responses.KEEP, "KEYS", responses.KeepKeys),
    (responses.KEEP, "ARGV", responses.KeepArgs),
    (recorders.REPORT, "KEYS", recorders.RecorderKeys),
    (recorders.REPORT, "ARGV", recorders.RecorderArgs),
    (producer_lease.LEASE, "KEYS", producer_lease.LeaseKeys),
    (producer_lease.LEASE, "ARGV", producer_lease.LeaseArgs),
    (run_rows.END_ROW, "KEYS", run_rows.EndRowKeys),
    (run_rows.END_ROW, "ARGV", run_rows.EndRowArgs),
    (run_rows.FORGET_ROWS, "KEYS", run_rows.ForgetRowsKeys),
    (run_rows.FORGET_ROWS, "ARGV", run_rows.ForgetRowsArgs),
    (sessions.CREATE, "KEYS", sessions.CreateSessionKeys),
    (sessions.CREATE, "ARGV", sessions.CreateSessionArgs),
    (sessions.CUT, "KEYS", sessions.CutSessionKeys),
    (sessions.CUT, "ARGV", sessions.CutSessionArgs),
    (sessions.REPLACE, "KEYS", sessions.ReplaceSessionKeys),
    (sessions.REPLACE, "ARGV", sessions.ReplaceSessionArgs),
    (turns.BEGIN, "KEYS", turns.BeginKeys),
    (turns.BEGIN, "ARGV", turns.BeginArgs),
    (maintenance.RELEASE_TURN, "KEYS", maintenance.ReleaseTurnKeys),
    (maintenance.RELEASE_TURN, "ARGV", maintenance.ReleaseTurnArgs),
    (maintenance.RELEASE_DEPENDENT, "KEYS", maintenance.ReleaseDependentKeys),
    (maintenance.RELEASE_DEPENDENT, "ARGV", maintenance.ReleaseDependentArgs),
    (stream.APPEND, "ARGV", stream.AppendArgs),
    (claim.CLAIM, "KEYS", claim.ClaimKeys),
    (claim.CLAIM, "ARGV", claim.ClaimArgs),
    (LEASE_LUA, "keys", leases.LeaseKeys),
    (LEASE_LUA, "args", leases.LeaseArgs),
    (job_end.SETTLE, "KEYS", job_end.SettleKeys),
    (job_end.SETTLE, "ARGV", job_end.SettleArgs),
    (leases.RETURN, "KEYS", leases.ReturnKeys),
    (leases.RETURN, "ARGV", leases.ReturnArgs),
    (backlog.COUNT, "KEYS", backlog.CountKeys),
    (backlog.COUNT, "ARGV", backlog.CountArgs),
    (presence.BIRTH, "KEYS", presence.BirthKeys),
    (presence.BIRTH, "ARGV", presence.BirthArgs),
    (presence.REPORT, "KEYS", presence.ReportKeys),
    (presence.REPORT, "ARGV", presence.ReportArgs),
    (operator.ANSWER, "KEYS", operator.AnswerKeys),
    (operator.ANSWER, "ARGV", operator.AnswerArgs),
    (rights.PROBE, "KEYS", rights.ProbeKeys),
    (workers.ELECT, "KEYS", workers.ElectKeys),
    (workers.ELECT, "ARGV", workers.ElectArgs),
    (workers.RENEW, "KEYS", workers.RenewKeys),
    (workers.RENEW, "ARGV", workers.RenewArgs),
    (workers.LEAVE, "KEYS", workers.LeaveKeys),
    (workers.LEAVE, "ARGV", workers.LeaveArgs),
    (maintenance.KEEP, "KEYS", maintenance.KeepKeys),
    (maintenance.KEEP, "ARGV", maintenance.KeepArgs),
    (maintenance.NEARER, "KEYS", maintenance.NearerKeys),
    (maintenance.NEARER, "ARGV", maintenance.NearerArgs),
    (job_end.RECORD, "ARGV", job_end.RecordArgs),
    (wake_lists.WAKE, "KEYS", wake_lists.WakeKeys),
    (wake_lists.WAKE, "ARGV", wake_lists.WakeArgs),
    (results_folder.FOLDER, "KEYS", results_folder.FolderKeys),
    (results_folder.FOLDER, "ARGV", results_folder.FolderArgs),
    (part_plans.LOCK, "KEYS", part_plans.LockKeys),
    (part_plans.LOCK, "ARGV", part_plans.LockArgs),
    (part_plans.PLAN, "KEYS", part_plans.PlanKeys),
    (part_plans.PLAN, "ARGV", part_plans.PlanArgs),
    (part_plans.COMMIT, "KEYS", part_plans.CommitKeys),
    (part_plans.COMMIT, "ARGV", part_plans.CommitArgs),
    (part_plans.RELEASE, "KEYS", part_plans.ReleaseKeys),
    (part_plans.RELEASE, "ARGV", part_plans.ReleaseArgs),
]


# In the order in which scripts have them in front.
PRELUDES = (
    *(JOB_END_LUA, DEPENDENTS_LUA, QUEUE_LUA, TURNS_LUA, RESERVATIONS_LUA, STREAM_END_LUA),
    *(DELETE_JOB_LUA, TENANT_RUNNING_LUA, STATUSES_LUA, AFFINITY_LUA, LONGER_LUA, LEASE_LUA),
)


def header_of(text: str) -> str:
    _, body = lua.split_flags(text)
    return "\n".join(takewhile(lambda line: line.startswith("--"), body.splitlines()))


def unpacked(script: str, table: str) -> list[tuple[str, ...]]:
    """The names of each `local a, b, … = unpack(TABLE)`."""
    lines = re.findall(rf"^ *local ([\w,\s]+?) = unpack\({table}\)$", script, re.MULTILINE)
    return [tuple(re.split(r",\s*", names)) for names in lines]


def test_scripts_are_found() -> None:
    assert {"enqueue", "cancel"} <= {path.stem for path in SCRIPTS}


def test_only_the_store_sends_scripts() -> None:
    files = [path for package in ("jobs", "worker") for path in (ROOT / package).rglob("*.py")]
    sends = re.compile(r"\blua\.load\(|\bregister_script\(")
    senders = {path for path in files if sends.search(path.read_text())}
    outside = {path for path in senders if path.parent != ROOT / "jobs/store"}
    assert senders > outside, "the search finds nothing"
    assert outside == {ROOT / "jobs/testing/connections.py"}  # for fakeredis, without their flags
    assert {path.parent for path in SCRIPTS} == {ROOT / "jobs/store/scripts"}


# Commands about the server, not about a key.
OF_SERVER = {"ping", "info", "config_get"}
COMMANDS = {name for name in dir(CoreCommands) if not name.startswith("_")} - OF_SERVER


def commands_in(text: str) -> Iterator[str]:
    """What sends commands about keys in a source: methods of a client, a pipeline, and the
    functions that describe commands to sync and async clients."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Attribute(attr="pipeline")):
                yield ast.unparse(node)
            case ast.ImportFrom(module="jobs.store.connection.protocol", names=names):
                yield from (one.name for one in names if one.name in ("command", "commands"))
            case ast.Call(func=ast.Attribute(value=receiver, attr=name)) if name in COMMANDS:
                if re.search(r"(redis|client|pipe|pipeline)$", ast.unparse(receiver)):
                    yield ast.unparse(node)


def test_only_the_store_sends_commands_about_keys() -> None:
    files = [path for package in ("jobs", "worker") for path in (ROOT / package).rglob("*.py")]
    found = {path: list(commands_in(path.read_text())) for path in files}
    senders = {str(path.relative_to(ROOT)) for path, calls in found.items() if calls}
    outside = {name for name in senders if not name.startswith("jobs/store/")}
    assert len(senders) > len(outside) + 10, "the search finds too little"
    assert outside == {"jobs/testing/connections.py"}, found  # the store's commands, on fakeredis


def test_each_script_opens_with_a_header_that_describes_it() -> None:
    for path in SCRIPTS:
        text = path.read_text()
        header = header_of(text)
        if header.startswith("-- Prelude"):  # defines functions for other scripts
            assert not re.search(r"\b(KEYS|ARGV)\b", text), path
            continue
        _, _, description = header.partition("\n--\n")
        parts = re.findall(r"^-- (KEYS  |ARGV  |Returns |Atomic: )", description, re.MULTILINE)
        assert parts == ["KEYS  ", "ARGV  ", "Returns ", "Atomic: "], path


def test_each_script_compiles(redis_url: str) -> None:
    preludes = JOB_END_LUA + DELETE_JOB_LUA + TENANT_RUNNING_LUA + LEASE_LUA
    with redis.Redis.from_url(redis_url) as client:
        for path in SCRIPTS:
            flags, body = lua.split_flags(path.read_text())
            try:
                client.script_load(flags + preludes + body)
            except redis.ResponseError as error:
                pytest.fail(f"{path.name}: {error}")


def test_each_script_has_in_front_the_functions_that_it_calls() -> None:
    """A missing one would be a global that Redis refuses, which pcall hides."""
    defines = re.compile(r"^local function (\w+)\(", re.MULTILINE)
    functions = {name for path in SCRIPTS for name in defines.findall(path.read_text())}
    whole = {script for script, table, _ in CASES if table in ("KEYS", "ARGV")}
    for script in whole:
        text = re.sub(r"--.*", "", script)
        found = {one[1]: one.start(1) for one in re.finditer(r"local function (\w+)\(", text)}
        for call in re.finditer(r"(?<![\w.:])(\w+)\(|(?<=\bpcall\()(\w+)", text):
            name = call[1] or call[2]
            if name in functions:
                assert found.get(name, len(text)) <= call.start(), (name, text[-60:])


def test_each_unpacked_table_has_names_in_python() -> None:
    for path in SCRIPTS:
        _, text = lua.split_flags(path.read_text())
        tables = {table for table in ("KEYS", "ARGV", "keys", "args") if unpacked(text, table)}
        named = {table for script, table, _ in CASES if script.endswith(text)}
        assert tables == named, path


def test_each_script_takes_what_python_passes() -> None:
    for script, table, names in CASES:
        assert set(unpacked(script, table)) == {names._fields}, names


def test_the_variable_tail_follows_the_named_elements() -> None:
    for script, table, names in CASES:
        for name, first in re.findall(rf"(\w+) = \{{unpack\({table}, (\d+)\)\}}", script):
            assert int(first) == len(names._fields) + 1, names
            assert f"{name}…: " in script, names
        assert script.count(f"unpack({table}, ") == script.count(f"= {{unpack({table}, "), names


def test_the_headers_list_the_names_in_order() -> None:
    for script, table, names in CASES:
        _, body = lua.split_flags(script)
        for prelude in PRELUDES:
            body = body if body == prelude else body.removeprefix(prelude)
        (section,) = re.findall(rf"^-- {table}  (.*?)^-- (?=\S)", header_of(body), re.M | re.S)
        listed = re.findall(r"^(?:--       )?((?:\w+, )*\w+): ", section, re.MULTILINE)
        assert tuple(", ".join(listed).split(", ")) == names._fields, names
