"""The plan of a soak: which faults happen, in which order, and how long each one lasts.

A round has every fault at least once, in an order of its own. The same seed gives the same plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

LEASE_SECONDS = 2.0  # of the soak's workers


class Fault(StrEnum):
    KILL = "SIGKILL of a worker"
    FREEZE = "SIGSTOP of a worker"
    STOP = "SIGTERM of a worker"
    RESTART = "restart of Redis"
    OUTAGE = "outage of Redis, longer than a lease"
    SILENCE = "SIGSTOP of Redis, longer than a lease"
    POWER_CUT = "power cut of Redis: AOF cut back to its last fdatasync"
    FAIL_OVER = "fail-over to a replica that lagged"
    FULL_REDIS = "Redis at its maxmemory"
    FULL_DISK = "full results disk"
    DROP = "all connections dropped"


# How often each fault happens in a round, and for how many seconds.
ROUND: dict[Fault, tuple[int, float, float]] = {
    Fault.KILL: (3, 0.0, 0.0),
    Fault.FREEZE: (2, 0.5, 2 * LEASE_SECONDS),
    Fault.STOP: (2, 0.0, 0.0),
    Fault.RESTART: (1, 0.0, 0.3),
    Fault.OUTAGE: (1, 1.2 * LEASE_SECONDS, 2 * LEASE_SECONDS),
    Fault.SILENCE: (1, 1.2 * LEASE_SECONDS, 2 * LEASE_SECONDS),
    Fault.POWER_CUT: (1, 0.0, 0.3),
    Fault.FAIL_OVER: (1, 1.0, 3.0),
    Fault.FULL_REDIS: (1, 2.0, 4.0),
    Fault.FULL_DISK: (1, 2.0, 4.0),
    Fault.DROP: (2, 0.0, 0.0),
}
PAUSE_SECONDS = (0.3, 1.5)  # before a fault
WORKERS = 3


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault. `worker`: its number, of a fault of workers."""

    fault: Fault
    pause: float  # seconds before it
    seconds: float
    worker: int


def rounds(seed: int) -> Iterator[list[Planned]]:
    """The rounds of the plan, without an end."""
    rng = random.Random(seed)
    while True:
        faults = [fault for fault, (count, _, _) in ROUND.items() for _ in range(count)]
        rng.shuffle(faults)
        yield [
            Planned(
                fault,
                rng.uniform(*PAUSE_SECONDS),
                rng.uniform(*ROUND[fault][1:]),
                rng.randrange(WORKERS),
            )
            for fault in faults
        ]
