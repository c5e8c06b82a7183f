"""Every Lua script is documented in its header, compiles, and takes what Python passes to it."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs import lua
from jobs.store import (
    cancel,
    dead_letters,
    job_end,
    new_job,
    rq_backlog,
    rq_deferred,
    rq_scripts,
    rq_upkeep,
    rq_workers,
    session_scripts,
    turns,
)
from jobs.store.job_end import JOB_END_LUA
from jobs.store.rq_format import DEPENDENTS_LUA, ROWS_LUA, TENANTS_LUA
from jobs.store.turns import TURNS_LUA
from jobs.stream import writer
from jobs.stream.entries import END_LUA
from worker.queue import rq_presence, rq_rights, waker
from worker.record import folder, part_plans

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(
    path for package in ("jobs", "worker") for path in ROOT.glob(f"{package}/**/scripts/*.lua")
)

# The text of each script, a table that it unpacks, and the names that Python gives its elements.
CASES: list[tuple[str, str, Any]] = [
    (new_job.ENQUEUE, "KEYS", new_job.EnqueueKeys),
    (new_job.ENQUEUE, "ARGV", new_job.EnqueueArgs),
    (JOB_END_LUA, "keys", job_end.EndKeys),
    (JOB_END_LUA, "args", job_end.EndArgs),
    (cancel.CANCEL, "KEYS", cancel.CancelKeys),
    (cancel.CANCEL, "ARGV", cancel.CancelArgs),
    (dead_letters.REQUEUE, "KEYS", dead_letters.RequeueKeys),
    (dead_letters.REQUEUE, "ARGV", dead_letters.RequeueArgs),
    (dead_letters.PURGE, "KEYS", dead_letters.PurgeKeys),
    (dead_letters.PURGE, "ARGV", dead_letters.PurgeArgs),
    (session_scripts.CREATE, "KEYS", session_scripts.CreateSessionKeys),
    (session_scripts.CREATE, "ARGV", session_scripts.CreateSessionArgs),
    (session_scripts.CUT, "KEYS", session_scripts.CutSessionKeys),
    (session_scripts.CUT, "ARGV", session_scripts.CutSessionArgs),
    (session_scripts.REPLACE, "KEYS", session_scripts.ReplaceSessionKeys),
    (session_scripts.REPLACE, "ARGV", session_scripts.ReplaceSessionArgs),
    (turns.BEGIN, "KEYS", turns.BeginKeys),
    (turns.BEGIN, "ARGV", turns.BeginArgs),
    (rq_deferred.RELEASE_TURN, "KEYS", rq_deferred.ReleaseTurnKeys),
    (rq_deferred.RELEASE_TURN, "ARGV", rq_deferred.ReleaseTurnArgs),
    (rq_deferred.RELEASE_DEPENDENT, "KEYS", rq_deferred.ReleaseDependentKeys),
    (rq_deferred.RELEASE_DEPENDENT, "ARGV", rq_deferred.ReleaseDependentArgs),
    (writer.APPEND, "ARGV", writer.AppendArgs),
    (rq_scripts.CLAIM, "KEYS", rq_scripts.ClaimKeys),
    (rq_scripts.CLAIM, "ARGV", rq_scripts.ClaimArgs),
    (rq_scripts.LEASE_LUA, "keys", rq_scripts.LeaseKeys),
    (rq_scripts.LEASE_LUA, "args", rq_scripts.LeaseArgs),
    (rq_scripts.SETTLE, "KEYS", rq_scripts.SettleKeys),
    (rq_scripts.SETTLE, "ARGV", rq_scripts.SettleArgs),
    (rq_scripts.RETURN, "KEYS", rq_scripts.ReturnKeys),
    (rq_scripts.RETURN, "ARGV", rq_scripts.ReturnArgs),
    (rq_backlog.COUNT, "KEYS", rq_backlog.CountKeys),
    (rq_backlog.COUNT, "ARGV", rq_backlog.CountArgs),
    (rq_presence.BIRTH, "KEYS", rq_presence.BirthKeys),
    (rq_presence.BIRTH, "ARGV", rq_presence.BirthArgs),
    (rq_presence.REPORT, "KEYS", rq_presence.ReportKeys),
    (rq_presence.REPORT, "ARGV", rq_presence.ReportArgs),
    (rq_rights.PROBE, "KEYS", rq_rights.ProbeKeys),
    (rq_workers.ELECT, "KEYS", rq_workers.ElectKeys),
    (rq_workers.ELECT, "ARGV", rq_workers.ElectArgs),
    (rq_workers.RENEW, "KEYS", rq_workers.RenewKeys),
    (rq_workers.RENEW, "ARGV", rq_workers.RenewArgs),
    (rq_workers.LEAVE, "KEYS", rq_workers.LeaveKeys),
    (rq_workers.LEAVE, "ARGV", rq_workers.LeaveArgs),
    (rq_upkeep.KEEP, "KEYS", rq_upkeep.KeepKeys),
    (rq_upkeep.KEEP, "ARGV", rq_upkeep.KeepArgs),
    (rq_upkeep.NEARER, "KEYS", rq_upkeep.NearerKeys),
    (rq_upkeep.NEARER, "ARGV", rq_upkeep.NearerArgs),
    (rq_upkeep.RECORD, "ARGV", rq_upkeep.RecordArgs),
    (waker.WAKE, "KEYS", waker.WakeKeys),
    (waker.WAKE, "ARGV", waker.WakeArgs),
    (folder.FOLDER, "KEYS", folder.FolderKeys),
    (folder.FOLDER, "ARGV", folder.FolderArgs),
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
    *(JOB_END_LUA, END_LUA, DEPENDENTS_LUA, TENANTS_LUA, TURNS_LUA, ROWS_LUA),
    rq_scripts.LEASE_LUA,
)


def header_of(text: str) -> str:
    _, body = lua.split_flags(text)
    return "\n".join(takewhile(lambda line: line.startswith("--"), body.splitlines()))


def unpacked(script: str, table: str) -> list[tuple[str, ...]]:
    """The names of each `local a, b, … = unpack(TABLE)`."""
    lines = re.findall(rf"^ *local ([\w,\s]+?) = unpack\({table}\)$", script, re.MULTILINE)
    return [tuple(re.split(r",\s*", names)) for names in lines]


def test_scripts_are_found() -> None:
    assert {"rq_enqueue", "rq_cancel"} <= {path.stem for path in SCRIPTS}


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
    preludes = JOB_END_LUA + rq_scripts.LEASE_LUA
    with redis.Redis.from_url(redis_url) as client:
        for path in SCRIPTS:
            flags, body = lua.split_flags(path.read_text())
            try:
                client.script_load(flags + preludes + body)
            except redis.ResponseError as error:
                pytest.fail(f"{path.name}: {error}")


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
