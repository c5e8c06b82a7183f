"""Failed attempts in a job's hash, which anyone may write to."""

from __future__ import annotations

import json

import pytest

from jobs import JobError
from jobs.results.failures import KEPT, MAX_MESSAGE, add_failure, failure, parse_failures

ONE = failure(1, 2.5, "w", JobError("internal", "x" * 1000))


def test_the_newest_failures_are_kept_with_short_messages() -> None:
    found = [ONE]
    for attempt in range(2, 30):
        found = add_failure(
            found, failure(attempt, 2.5, "w", JobError("internal", "é\ud800" * 500))
        )
    assert [one["attempt"] for one in found] == list(range(30 - KEPT, 30))
    assert all(len(one["message"]) <= MAX_MESSAGE for one in found)
    assert parse_failures(json.dumps(found).encode()) == found
    assert len(json.dumps(found)) < 10_000


@pytest.mark.parametrize(
    "value", [None, b"", b"{", b"3", b"{}", b"\xff", b"[1]", b'[{"attempt": 1}]', b"[" * 100_000]
)
def test_what_is_no_failure_is_left_out(value: bytes | None) -> None:
    assert parse_failures(value) == []
