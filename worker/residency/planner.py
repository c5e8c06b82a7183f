"""Which model a worker brings into memory next, and which make room for it.

A pure function over numbers: the manager gathers them and carries the plan out. The rule:

1. A model whose jobs wait and that fits beside the others is brought in, whoever's first job has
   waited longest for its model first.
2. If it does not fit, models without waiting jobs make room, after the end of their running ones.
   First those without any jobs: least recently used first, weighted by the time that it takes to
   load them again.
3. Models with waiting jobs make room only when a job has waited for its model for `max_wait`
   seconds, and after a residence of MIN_LOADS times their own load.
4. Pinned models never make room, and a model with running jobs is never unloaded.

Let L be the longest load, R = (MIN_LOADS + 1) * L a load with the shortest residence after it, D
the longest drain, m the number of models that contend for the same memory. A job whose model is not
in memory waits for it at most

    max(max_wait, R) + D + L + (m - 2) * (R + D)

seconds, while loads work: another model may have come in just before, and the one whose job waits
longest is next, so each other one comes in at most once before it.
tests/worker/residency/test_planner.py simulates it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from worker.queue.model_state import State

MIN_LOADS = 3.0  # loads of a model that its residence lasts, at least, while it has jobs
SPARE_LOADS = 1.0  # loads that a job waits before a second worker brings its model in


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One model at the time of a plan. Times are in seconds."""

    name: str
    nbytes: int  # its share of the budget
    state: State
    pinned: bool = False
    keep_alive: float = inf
    queued: int = 0  # jobs in its queues
    oldest: float = 0.0  # how long the first of them has waited
    running: int = 0  # jobs here
    load_seconds: float = 1.0  # of its last load, else an estimate
    since: float = inf  # resident: since it was loaded; else: since it was unloaded
    idle: float = 0.0  # since its last job ended
    may_load: bool = True  # False after a load that failed, or while another worker loads it
    elsewhere: bool = False  # another worker takes its jobs

    @property
    def busy(self) -> bool:
        return bool(self.queued or self.running)

    @property
    def waits(self) -> float:
        """How long its first job has waited for the model: time in which the model was in memory is
        time in which the job waited for other jobs."""
        return min(self.oldest, self.since)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now. A plan without anything is to go on."""

    unload: tuple[str, ...] = ()  # models without running jobs
    load: str | None = None  # after that
    drain: frozenset[str] = frozenset()  # models that take no more jobs, to make room later
    target: str | None = None  # the model for which models drain or are unloaded


def plan(models: Sequence[ModelView], budget: int, max_wait: float) -> Plan:
    """models: all that the worker may serve. budget: bytes. max_wait: see above, in seconds."""
    if any(one.state is State.LOADING for one in models):
        return Plan()
    expired = tuple(
        one.name
        for one in models
        if one.state is State.READY and not (one.pinned or one.busy) and one.idle >= one.keep_alive
    )
    if expired:
        return Plan(unload=expired)
    waiting = [one for one in models if not one.state.resident and one.queued and one.may_load]
    for one in sorted(waiting, key=lambda one: (-one.waits, one.name)):
        if one.elsewhere and one.waits < SPARE_LOADS * one.load_seconds:
            continue
        room = make_room(one, models, budget, max_wait)
        if room is not None and not any(victim.running for victim in room):
            return Plan(tuple(victim.name for victim in room), one.name, target=one.name)
        if room is not None:
            return Plan(drain=frozenset(victim.name for victim in room), target=one.name)
        if one.waits >= max_wait and not one.elsewhere:
            break  # it is next: nobody takes the memory that it waits for
    return Plan()


def make_room(
    wanted: ModelView, models: Sequence[ModelView], budget: int, max_wait: float
) -> list[ModelView] | None:
    """The models that make room for another one now; None if there is no room yet."""
    resident = [one for one in models if one.state.resident]
    lacking = wanted.nbytes - (budget - sum(one.nbytes for one in resident))
    if lacking <= 0:
        return []
    overdue = wanted.waits >= max_wait
    may_go = [
        one
        for one in resident
        if not one.pinned
        and (
            not one.busy
            if wanted.elsewhere
            else not one.queued
            or one.state is State.DRAINING
            or (overdue and one.since >= MIN_LOADS * one.load_seconds)
        )
    ]
    chosen: list[ModelView] = []
    for one in sorted(may_go, key=eviction_order):
        if lacking <= 0:
            break
        chosen.append(one)
        lacking -= one.nbytes
    if lacking > 0:
        return None
    for one in list(chosen):  # a small one may not be needed beside a large one after it
        if lacking + one.nbytes <= 0:
            chosen.remove(one)
            lacking += one.nbytes
    return chosen


def eviction_order(one: ModelView) -> tuple[bool, bool, float, str]:
    """Models without jobs and those that drain already are first; of these the one whose load is
    the cheapest beside the time in which nobody used it."""
    stays = one.state is not State.DRAINING
    unused = 0.0 if one.busy else one.idle
    cost = -unused / max(one.load_seconds, 1e-9)
    return stays and one.queued > 0, stays and one.running > 0, cost, one.name
