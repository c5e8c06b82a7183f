"""The lease on a run, which allows one process at a time to enqueue its rows.

Each script that changes rows of the run compares the token of the lease: a producer that was
frozen, and whose place another one has taken, changes nothing.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import redis

from jobs import keys, lua
from jobs.store.connection.protocol import Steps, command, retry

LEASE = lua.load("jobs.store", "producer_lease")

LEASE_SECONDS = 15.0  # a producer that does not renew its lease for so long loses the run
RENEW_SECONDS = 3.0  # between two renewals

logger = logging.getLogger(__name__)


class LeaseKeys(NamedTuple):
    """KEYS of the script."""

    producer: str


class LeaseArgs(NamedTuple):
    """ARGV of the script."""

    token: str
    expected: str
    milliseconds: int


class LeaseLost(Exception):
    """Another process may have enqueued rows of the run since, or enqueues them."""

    def __init__(self, run: str) -> None:
        super().__init__(f"another process enqueues the rows of run {run}")


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds the lease on a run."""

    token: str  # its value in Redis

    @classmethod
    def of_this_process(cls) -> Holder:
        facts = {"host": socket.gethostname(), "processes": _process_space(), "pid": os.getpid()}
        return cls(json.dumps({**facts, "key": secrets.token_hex(8)}))

    def __str__(self) -> str:
        facts = self._facts()
        return f"process {facts.get('pid', '?')} on {facts.get('host', '?')}"

    @property
    def is_dead(self) -> bool:
        """True if it was a process of this host, and is gone. Containers with one host name, as
        those in the network of their host, do not see each other's processes."""
        facts = self._facts()
        pid, space = facts.get("pid"), facts.get("processes")
        is_near = facts.get("host") == socket.gethostname() and space == _process_space()
        if not is_near or space is None or not isinstance(pid, int) or pid < 1:
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False
        return False

    def _facts(self) -> dict[str, Any]:
        try:
            facts = json.loads(self.token)
        except ValueError:
            return {}
        return facts if isinstance(facts, dict) else {}


def _process_space() -> int | None:
    """The namespace of the ids of the processes that this one sees; None if it is not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


class ProducerLease:
    """The lease of this process on one run. `acquire` starts a thread that renews it until
    `release`, however long the process reads files or renders prompts.

    A lease that has expired is lost, even if nobody holds it now: another process may have had it.
    Use it as a context manager, which releases it.
    """

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.run = run
        self.token = Holder.of_this_process().token
        self._script = client.register_script(LEASE)
        self._renewal: threading.Thread | None = None
        self._released, self._lost = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(redis.RedisError):  # the lease expires
            self.release()

    def acquire(self) -> Holder | None:
        """Take the lease. Returns the process that holds it, None if this one does. The lease of a
        dead process of this host is taken at once. Raises redis.RedisError."""
        self._stop()
        holder = Holder(self._call(""))
        if holder.token != self.token and holder.is_dead:
            holder = Holder(self._call(holder.token))
        if holder.token != self.token:
            return holder
        self._released.clear()
        self._lost.clear()
        self._renewal = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewal.start()
        return None

    def check(self) -> None:
        """Raises LeaseLost if the last renewal has found it lost. Calls no Redis."""
        if self._lost.is_set():
            raise LeaseLost(self.run)

    def renew(self) -> None:
        """Renew it now. Raises LeaseLost, and redis.RedisError."""
        self.check()
        if self._call(self.token) != self.token:
            self._lost.set()
        self.check()

    def release(self) -> None:
        """Let another process have the run at once. Raises redis.RedisError."""
        self._stop()
        self._call(self.token, 0.0)

    def _stop(self) -> None:
        self._released.set()
        if self._renewal is not None:
            self._renewal.join()
            self._renewal = None

    def _renew(self) -> None:
        while not self._released.wait(RENEW_SECONDS):
            try:
                self.renew()
            except LeaseLost:
                return
            except redis.RedisError as error:
                logger.debug("run %s: the lease is not renewed: %s", self.run, error)

    def _call(self, expected: str, seconds: float = LEASE_SECONDS) -> str:
        names = LeaseKeys(keys.producer(self.run))
        args = LeaseArgs(self.token, expected, int(1000 * seconds))
        found: bytes = self._script(keys=names, args=args)
        return found.decode(errors="replace")


def is_held(run: str, deadline: float | None = None) -> Steps[bool]:
    """True while a process enqueues the rows of a run. An outage is waited out until `deadline`."""
    return bool((yield from retry(command("exists", keys.producer(run)), deadline)))


def are_held(connected: redis.Redis, runs: Sequence[str]) -> list[bool]:
    """`is_held` of several runs, at one moment. Raises redis.RedisError."""
    pipeline = connected.pipeline(transaction=False)
    for run in runs:
        pipeline.exists(keys.producer(run))
    return [bool(found) for found in pipeline.execute()]
