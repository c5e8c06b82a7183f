"""The names of KEYS and ARGV in the Lua scripts are those that Python passes, in the same order."""

from __future__ import annotations

import re
from typing import Any

import pytest

from worker.queue import rq_job, rq_scripts
from worker.record import part_plans


def unpacked(script: str, table: str) -> tuple[str, ...]:
    """The names of `local a, b, … = unpack(TABLE)`."""
    (names,) = re.findall(rf"^local ([\w,\s]+?) = unpack\({table}\)$", script, re.MULTILINE)
    return tuple(re.split(r",\s*", names))


@pytest.mark.parametrize(
    ("script", "table", "names"),
    [
        (rq_scripts.CLAIM, "ARGV", rq_scripts.ClaimArgs),
        (rq_scripts.SETTLE, "KEYS", rq_scripts.SettleKeys),
        (rq_scripts.SETTLE, "ARGV", rq_scripts.SettleArgs),
        (rq_scripts.RETURN, "KEYS", rq_scripts.ReturnKeys),
        (rq_scripts.RETURN, "ARGV", rq_scripts.ReturnArgs),
        (part_plans.PLAN, "KEYS", part_plans.PlanKeys),
        (part_plans.PLAN, "ARGV", part_plans.PlanArgs),
        (part_plans.COMMIT, "KEYS", part_plans.CommitKeys),
        (part_plans.COMMIT, "ARGV", part_plans.CommitArgs),
    ],
)
def test_a_script_takes_what_python_passes(script: str, table: str, names: Any) -> None:
    assert unpacked(script, table) == names._fields


@pytest.mark.parametrize(
    ("script", "names"),
    [(rq_scripts.CLAIM, rq_scripts.ClaimArgs), (rq_scripts.SETTLE, rq_scripts.SettleArgs)],
)
def test_the_variable_tail_follows_the_named_arguments(script: str, names: Any) -> None:
    (first,) = re.findall(r"unpack\(ARGV, (\d+)\)", script)
    assert int(first) == len(names._fields) + 1


def test_a_claim_returns_the_fields_that_a_worker_reads() -> None:
    (call,) = re.findall(r"'HMGET', job, (.*?)\)", rq_scripts.CLAIM, re.DOTALL)
    assert tuple(re.findall(r"'(\w+)'", call)) == rq_job.FIELDS
