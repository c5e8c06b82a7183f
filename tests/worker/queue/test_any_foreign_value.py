"""Any value of another program in any key of chatjobs: workers live on, and other jobs end.

The keys are found in jobs/keys.py by their functions and constants, so a new one is covered.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from jobs import JobError, keys
from jobs.store.damage import find_damage, type_of
from tests.worker.site import PATIENCE, Site, wait_until

# The parts of keys: those of other queues, runs, jobs, sessions, tenants
# and workers than the ones whose jobs must end.
PARTS: dict[str, Any] = {
    "queue": "bulk:other",
    "func": "worker.tasks.other",
    "queues": ["bulk:other"],
    "model": "other",
    "tenant": "t",
    "job": "j",
    "name": "n",
    "command": "c",
    "bucket": 1,
    "fingerprint": "f",
    "session": "s",
    "run": "r",
    "row": 1,
    "repeat": 1,
}
CHANNELS = {keys.CONTROL, keys.BARRIER, keys.live("j")}  # pub/sub: nothing is stored

JUNK: tuple[Any, ...] = (
    b"",
    b"x",
    b"\xff\xfe",
    b"-1",
    b"1e400",
    b"nan",
    b"[]",
    b"{}",
    b"[[[[",
    b"null",
)
SCORES = ("-inf", "-1", "1", "1e300", "inf")
WRITERS: dict[str, Callable[[Any, str], object]] = {
    "string": lambda redis, key: redis.set(key, JUNK[len(key) % len(JUNK)]),
    "list": lambda redis, key: redis.rpush(key, *JUNK),
    "set": lambda redis, key: redis.sadd(key, *JUNK),
    "hash": lambda redis, key: redis.hset(
        key, mapping=dict(zip(JUNK, reversed(JUNK), strict=True))
    ),
    "zset": lambda redis, key: redis.zadd(key, dict(zip(JUNK, itertools.cycle(SCORES)))),
    "stream": lambda redis, key: [redis.xadd(key, {b"row": value}) for value in JUNK],
}


def all_keys() -> dict[str, bool]:
    """Every key of jobs/keys.py, and whether all jobs share it."""
    found = {
        value: True
        for name, value in vars(keys).items()
        if name.isupper() and isinstance(value, str) and value.startswith("chatjobs:")
    }
    for name, function in inspect.getmembers(keys, inspect.isfunction):
        if function.__module__ != keys.__name__:
            continue
        words = inspect.signature(function).parameters
        options = {word: PARTS[word] for word in words if word in PARTS}
        assert set(words) - set(options) <= {"priority", "bulk"}, f"{name}: add its parts to PARTS"
        if set(words) <= set(PARTS) | {"bulk"}:
            key = function(**options)
            if isinstance(key, str) and key.startswith("chatjobs:"):
                found[key] = False
    return {key: shared for key, shared in found.items() if key not in CHANNELS}


def test_each_key_has_a_type() -> None:
    assert len(all_keys()) > 25
    assert [key for key in all_keys() if type_of(key) not in WRITERS] == []


def test_values_of_the_right_type_stop_nobody(site: Site) -> None:
    """Junk in each key, of the type that the key has. Also in those that all jobs share."""
    worker = site.worker(models=["fake", "other"], lease_seconds=0.6)
    site.wait_for_workers()
    site.client.serving = None
    for key in all_keys():
        if key != keys.LIMITS:  # a number there is a limit
            WRITERS[str(type_of(key))](site.redis, key)
    jobs = [site.submit(str(number), run=f"own-{number}") for number in range(3)]
    assert all(job.result(timeout=PATIENCE).text for job in jobs)
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    assert worker.alive, worker.output


def test_keys_of_another_type_stop_nobody_else(site: Site) -> None:
    """All keys of another queue, run, session, tenant, job and worker have a wrong type at once."""
    worker = site.worker(models=["fake", "other"], lease_seconds=0.6)
    site.wait_for_workers()
    site.client.serving = None
    kinds = itertools.cycle(WRITERS)
    damaged = [key for key, shared in all_keys().items() if not shared]
    for key in damaged:
        kind = next(one for one in kinds if one != type_of(key))
        WRITERS[kind](site.redis, key)
    site.redis.sadd(keys.OUTBOXES, "r")
    site.redis.sadd("rq:queues", "rq:queue:bulk:other")
    site.redis.zadd(keys.WORKERS, {"n": 1})
    jobs = [site.submit(str(number), run=f"own-{number}") for number in range(3)]
    assert all(job.result(timeout=PATIENCE).text for job in jobs)
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    assert worker.alive, worker.output
    named = {one.key for one in find_damage(site.redis)}
    assert {keys.tenants("bulk:other"), keys.outbox("r"), keys.started("n")} <= named


def test_shared_keys_of_another_type_end_no_worker(site: Site) -> None:
    """They may stop jobs, which is said with the key; jobs end when the keys are renamed."""
    worker = site.worker(lease_seconds=0.6)
    site.wait_for_workers()
    site.client.serving = None
    shared = [key for key, is_shared in all_keys().items() if is_shared]
    for key in shared:
        kind = "string" if type_of(key) != "string" else "list"
        with site.redis.pipeline() as at_once:  # else the worker may write between the two
            at_once.delete(key)
            WRITERS[kind](at_once, key)
            at_once.execute()
    with pytest.raises(JobError, match="RENAME"):
        site.submit("refused")
    wait_until(lambda: keys.WORKERS in worker.output)
    for key in shared:
        if site.redis.exists(key):
            site.redis.rename(key, f"damaged:{key}")
    assert site.submit().result(timeout=PATIENCE).text
    wait_until(site.rows)
    assert worker.alive, worker.output
