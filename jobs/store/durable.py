"""Waits until what was written to Redis survives a crash: on its disk, and on its replicas.

The sync is observed in INFO. WAITAOF is not used: Redis 7.4 up to redis/redis pull request 13793,
and Valkey 9, reply to it before they have synced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from jobs import keys
from jobs.errors import JobError, invalid
from jobs.sizes import counted

# With appendfsync everysec, Redis begins to sync what it has written within a second.
SYNC_SECONDS = 2.0
POLL_SECONDS = 0.02  # between two looks; short, since Redis may begin the next sync at once
WAIT_MILLISECONDS = 200  # of one WAIT, below any timeout of a socket
SUBMIT_SECONDS = 60.0  # how long `submit(durable=True)` waits


class NotDurable(Exception):
    """A write may still be lost. The message says what it waits for."""


@dataclass(frozen=True, slots=True)
class Persistence:
    """The persistence of one server, from INFO."""

    server: str  # a new value whenever the server starts, and on each replica
    append_only: bool  # whether it keeps an append-only file
    syncing: bool  # a sync of that file is running
    failing: bool  # the last write to the file, or the last sync, failed
    replicas: int  # that are connected
    shared: bool  # it has a TCP port, unlike a private server


def read_persistence(client: redis.Redis) -> Persistence:
    """The state of the server now. Raises BusyLoadingError while it loads its data: until then,
    INFO says that there is no append-only file."""
    found: dict[str, Any] = client.info("server", "persistence", "replication")
    if found.get("loading"):
        raise redis.BusyLoadingError("Redis is loading its data")
    return Persistence(
        server=str(found.get("run_id", "")),
        append_only=bool(found.get("aof_enabled")),
        syncing=bool(found.get("aof_pending_bio_fsync")),
        failing=found.get("aof_last_write_status", "ok") != "ok",
        replicas=int(found.get("connected_slaves", 0)),
        shared=bool(found.get("tcp_port")),
    )


def wait_until_durable(
    client: redis.Redis, seconds: float, *, stopped: Callable[[], bool] = lambda: False
) -> Persistence:
    """Return when all that was written before is on the disk of Redis, if it has an append-only
    file that it syncs, and on all its connected replicas. Returns the state of the server.

    Raises NotDurable after `seconds`, when `stopped` returns True, or if another server answers.
    """
    deadline = time.monotonic() + seconds
    before = read_persistence(client)
    if before.append_only and _appendfsync(client) not in ("always", "no"):
        _wait_for_sync(client, deadline, stopped)
    _wait_for_replicas(client, deadline, stopped)
    after = read_persistence(client)
    if after.server != before.server:
        raise NotDurable("Redis was restarted, or another server took its place")
    return after


class DurableSubmit:
    """`submit(durable=True)`: made before the jobs are enqueued, `wait` is called after it.

    Raises InvalidRequest if this Redis can't keep jobs through a crash.
    """

    def __init__(self, client: redis.Redis) -> None:
        found = read_persistence(client)
        self._client, self._server = client, found.server
        if not found.append_only:
            raise invalid(
                "durable: Redis keeps no append-only file, so a crash loses its jobs: set "
                "appendonly yes (a private Redis: chatjobs work --redis embedded:DIR), "
                "or submit without durable; nothing was enqueued",
                "durable",
            )
        if _appendfsync(client) == "no":
            raise invalid(
                "durable: Redis never syncs its append-only file: set appendfsync everysec, or "
                "submit without durable; nothing was enqueued",
                "durable",
            )

    def wait(self, job_ids: Sequence[str], seconds: float = SUBMIT_SECONDS) -> None:
        """Return when the jobs survive a crash of Redis. Raises JobError if that is not certain."""
        if not job_ids:
            return
        more = f" and {len(job_ids) - 1} more" if len(job_ids) > 1 else ""
        try:
            found = wait_until_durable(self._client, seconds)
        except NotDurable as error:
            raise JobError(
                "timeout",
                f"job {job_ids[0]}{more} can be lost if Redis crashes now: {error} (waited up to "
                f"{seconds:g} s); the jobs are enqueued, do not submit them again",
            ) from None
        if found.server != self._server:
            raise JobError(
                "internal",
                f"job {job_ids[0]}{more} may be lost: Redis was restarted, or another server took "
                "its place; those whose status is unknown must be submitted again",
            )


def _wait_for_sync(client: redis.Redis, deadline: float, stopped: Callable[[], bool]) -> None:
    """See that no sync runs: Redis then writes all it has to the file, and begins the next sync
    within SYNC_SECONDS. After these, see again that no sync runs: that one has ended."""
    _wait_while_syncing(client, deadline, stopped)
    until = time.monotonic() + SYNC_SECONDS
    while time.monotonic() < until:
        _pause(deadline, stopped)
    read_persistence(client)  # if its event loop was blocked meanwhile, Redis begins the sync now
    _wait_while_syncing(client, deadline, stopped)


def _wait_while_syncing(client: redis.Redis, deadline: float, stopped: Callable[[], bool]) -> None:
    while (found := read_persistence(client)).syncing or found.failing:
        if found.failing:
            raise NotDurable("Redis can't write its append-only file")
        _pause(deadline, stopped)


def _wait_for_replicas(client: redis.Redis, deadline: float, stopped: Callable[[], bool]) -> None:
    """WAIT counts from the last write of its own connection, so one is sent in the same pipeline:
    PUBLISH goes to the replicas, creates no key, and is accepted when Redis is full."""
    while replicas := read_persistence(client).replicas:
        pipeline = client.pipeline(transaction=False)
        pipeline.publish(keys.BARRIER, "")
        pipeline.execute_command("WAIT", replicas, WAIT_MILLISECONDS)  # type: ignore[no-untyped-call]
        _, reached = pipeline.execute()
        if reached >= replicas:
            return
        behind = replicas - reached
        lag = "lags" if behind == 1 else "lag"
        _pause(deadline, stopped, f"{behind} of {counted(replicas, 'replica')} {lag} behind")


def _pause(
    deadline: float,
    stopped: Callable[[], bool],
    reason: str = "Redis has not synced its append-only file yet",
) -> None:
    if stopped() or time.monotonic() >= deadline:
        raise NotDurable(reason)
    time.sleep(POLL_SECONDS)


def _appendfsync(client: redis.Redis) -> str:
    """The sync policy; "" if this user may not read it."""
    try:
        settings: dict[str, str] = client.config_get("appendfsync")  # type: ignore[assignment]
    except redis.ResponseError:
        return ""
    return settings.get("appendfsync", "")
