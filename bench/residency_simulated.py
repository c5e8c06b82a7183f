"""The policies of `bench.residency` with a simulated clock: the same traffic, in seconds.

    python -m bench.residency_simulated [--seconds 120]

One device runs 8 jobs of 0.2 s at a time, of the one of two models that is in memory. Printed
for each load time, share of the device's rate and ratio of the models: jobs/s, and the waits from
submit to start: median, 95th percentile and longest.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from bench.residency import BATCH, BUDGET, JOBS_PER_SECOND, POLICIES, RATIOS
from bench.serving import percentile
from worker.queue.model_state import State
from worker.residency.manager import PLAN_SECONDS
from worker.residency.planner import ModelView

TICK, SERVICE_SECONDS = 0.02, 0.2
LOADS = ((0.5, 5.0), (2.0, 30.0))  # seconds of a load, and --max-wait
SHARES = (0.3, 0.6, 0.85)


class Result(NamedTuple):
    rate: float
    waits: list[float]
    swaps: int


@dataclass
class Model:
    name: str
    changed_at: float = -inf
    used_at: float = 0.0
    queue: list[float] = field(default_factory=list)  # when each job was submitted
    ends: list[float] = field(default_factory=list)  # of running jobs


@dataclass
class Device:
    """The first model is in memory at the start."""

    policy: str
    load_seconds: float
    max_wait: float
    models: list[Model] = field(default_factory=lambda: [Model("one", 0.0), Model("two")])
    now: float = 0.0
    draining: bool = False
    loaded_at: float = 0.0  # end of the load of the resident model
    next_plan: float = 0.0
    waits: list[float] = field(default_factory=list)
    swaps: int = 0

    def run(self, arrivals: list[tuple[float, int]]) -> Result:
        left, ended = list(reversed(arrivals)), 0
        while ended < len(arrivals):
            self.now += TICK
            while left and left[-1][0] <= self.now:
                moment, number = left.pop()
                next(one for one in self.models if one.name == ("one", "two")[number]).queue.append(
                    moment
                )
            for one in self.models:
                running = [end for end in one.ends if end > self.now]
                if len(running) < len(one.ends):
                    one.used_at, ended = self.now, ended + len(one.ends) - len(running)
                one.ends = running
            if self.now >= self.loaded_at:
                self.step()
        return Result(len(arrivals) / self.now, self.waits, self.swaps)

    def step(self) -> None:
        resident, other = self.models
        while not self.draining and resident.queue and len(resident.ends) < BATCH:
            self.waits.append(self.now - resident.queue.pop(0))
            resident.ends.append(self.now + SERVICE_SECONDS)
        if self.now < self.next_plan and (resident.ends or not self.draining):
            return
        self.next_plan = self.now + PLAN_SECONDS
        state = State.DRAINING if self.draining else State.READY
        views = [self.view(resident, state), self.view(other, State.UNLOADED)]
        plan = POLICIES[self.policy](views, BUDGET, self.max_wait)
        self.draining = bool(plan.drain)
        if plan.load is not None:
            resident.changed_at = self.now
            self.loaded_at = other.changed_at = self.now + self.load_seconds
            self.next_plan, self.swaps = self.loaded_at + PLAN_SECONDS, self.swaps + 1
            self.models.reverse()

    def view(self, one: Model, state: State) -> ModelView:
        return ModelView(
            name=one.name,
            nbytes=BUDGET,
            state=state,
            queued=len(one.queue),
            oldest=self.now - one.queue[0] if one.queue else 0.0,
            running=len(one.ends),
            load_seconds=self.load_seconds,
            since=self.now - one.changed_at,
            idle=self.now - max(one.used_at, one.changed_at),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="of arrivals")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"{'load':>4} {'share':>5} {'ratio':>5} {'policy':8} {'jobs/s':>6} p50, p95, max, swaps")
    for load_seconds, max_wait in LOADS:
        for share in SHARES:
            for ratio in RATIOS:
                choose = random.Random(f"{options.seed} {ratio}")
                arrivals, moment = [], 0.0
                while (moment := moment + choose.expovariate(share * JOBS_PER_SECOND)) < (
                    options.seconds
                ):
                    arrivals.append((moment, choose.choices((0, 1), ratio)[0]))
                for policy in POLICIES:
                    found = Device(policy, load_seconds, max_wait).run(arrivals)
                    waits = [percentile(found.waits, part) for part in (0.5, 0.95, 1.0)]
                    print(
                        f"{load_seconds:4} {share:5} {ratio[0]:3}:{ratio[1]} {policy:8} "
                        f"{found.rate:6.1f} {waits[0]:7.2f} {waits[1]:7.2f} {waits[2]:7.2f} "
                        f"{found.swaps:4}"
                    )


if __name__ == "__main__":
    main()
