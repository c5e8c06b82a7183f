"""Decides which models are in memory while a worker serves.

The loop's thread calls `step` in each round. It asks the planner (planner.py) for a plan, from the
queues, the running jobs and the wishes of operators, and has the executor (executor.py) carry it
out. Streams, cancellations and leases go on meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol

from jobs.errors import JobError, invalid
from jobs.sizes import counted
from jobs.store.waiting import Waiting
from worker.backend import ModelInfo, SwappingBackend
from worker.queue.load_figures import LoadFigures
from worker.queue.model_state import State
from worker.queue.served import Served
from worker.queue.status_collector import BudgetedModel, ResidencyStatus
from worker.residency.budget import size
from worker.residency.executor import FAILED_LOADS, Elsewhere, PlanExecutor
from worker.residency.model import Model
from worker.residency.planner import ModelView, plan
from worker.residency.policy import ResidencyPolicy

MAX_WAIT = 30.0  # seconds that a job waits for its model before models with waiting jobs make room
PLAN_SECONDS = 0.5  # between two looks at the queues


class Jobs(Protocol):
    """The jobs that run here, by the own names of their models."""

    @property
    def running(self) -> Mapping[str, int]:
        """Their numbers."""

    @property
    def used_at(self) -> Mapping[str, float]:
        """When one began or ended last (monotonic)."""


@dataclass(slots=True, eq=False)
class Wishes:
    """The wishes of operators for one model."""

    policy: ResidencyPolicy
    load: bool = False  # a command waits until the model takes jobs
    unload: bool = False  # a command waits until its memory is free


class Residency:
    """Owns the wishes of operators and the time of the next plan. Used by the loop's thread.

    waiting: reads the jobs in the queues of names. paused: True while the worker claims nothing;
    then models are loaded and unloaded by operators only.
    on_ready: called when a model takes jobs. wake: ends the loop's sleep; called by any thread.
    """

    def __init__(
        self,
        backend: SwappingBackend,
        served: Served,
        models: Sequence[Model],
        budget: int,
        waiting: Callable[[Sequence[str]], Mapping[str, Waiting]],
        jobs: Jobs,
        elsewhere: Elsewhere,
        *,
        max_wait: float = MAX_WAIT,
        paused: Callable[[], bool] = lambda: False,
        on_ready: Callable[[], None] = lambda: None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._served, self._budget, self._max_wait = served, budget, max_wait
        self._models = {model.name: model for model in models}
        self._wishes = {model.name: Wishes(model.policy) for model in models}
        self._waiting, self._jobs, self._elsewhere = waiting, jobs, elsewhere
        self._paused, self._clock = paused, clock
        self._executor = PlanExecutor(
            backend, served, self._models, elsewhere, on_ready=on_ready, wake=wake, clock=clock
        )
        self._next_plan = -inf  # monotonic
        self._stopped = False

    # --- what others ask --------------------------------------------------------------------------

    def status(self) -> ResidencyStatus:
        """The part of the worker's status that is about models which come and go."""
        histories = self._executor.histories
        return ResidencyStatus(
            models={
                name: BudgetedModel(
                    one.share.weights, one.share.total, self._wishes[name].policy.pin
                )
                for name, one in self._models.items()
            },
            failing=[name for name, one in histories.items() if one.failures >= FAILED_LOADS],
            loads=self._executor.loads,
            evictions=self._executor.evictions,
        )

    def figures(self) -> LoadFigures:
        """The figures of loads. Any thread may call it."""
        return self._executor.figures()

    def stop(self) -> None:
        """Bring no more models in. A load that runs goes on."""
        self._stopped = True

    # --- the operator -----------------------------------------------------------------------------

    def own_name(self, name: Any) -> str:
        """The own name of a model. Raises JobError("model_not_found")."""
        for one in self._models.values():
            if name in one.names:
                return one.name
        raise JobError(
            "model_not_found",
            f"this worker doesn't serve model {name!r}; it serves: {', '.join(self._models)}",
            "model",
        )

    def state(self, name: str) -> State:
        return self._served.state(name)

    def facts(self, name: str) -> dict[str, Any]:
        pinned = self._wishes[name].policy.pin
        return {"model": name, "state": self.state(name).value, "pinned": pinned}

    def request_load(self, name: str) -> None:
        """Bring a model in, as for a job that has waited for too long."""
        if self.state(name) is not State.READY:
            self._wishes[name].load = True
            self._executor.forget_failure(name)
        self._wishes[name].unload = False
        self._next_plan = -inf

    def check_load(self, name: str) -> None:
        """Raise JobError if a load that was requested has failed, or is not to come after all."""
        wishes, error = self._wishes[name], self._executor.histories[name].error
        if error is not None:
            wishes.load = False
            raise error
        if not wishes.load and self.state(name) is not State.READY:
            raise JobError(
                "unavailable", f"{name} is not loaded: a later command unloads it", "model"
            )

    def request_unload(self, name: str) -> None:
        """Unload a model at once. Raises JobError if it is pinned, or has jobs."""
        wishes = self._wishes[name]
        if wishes.policy.pin:
            raise invalid(f"{name} is pinned: unpin it first", "model")
        if self.state(name).resident:
            wishes.unload, wishes.load = True, False
            self._next_plan = -inf
            self.check_unload(name)

    def check_unload(self, name: str) -> None:
        """Raise JobError if a model whose unload was requested has jobs, or is to stay after all.
        Jobs in its queues do not count while the worker claims none."""
        wishes = self._wishes[name]
        if self.state(name) is not State.READY:
            return
        if not wishes.unload:
            raise JobError(
                "unavailable", f"{name} stays in memory: a later command loads or pins it", "model"
            )
        running = self._jobs.running.get(name, 0)
        found = {} if self._paused() else self._waiting([*self._models[name].names])
        waiting = sum(one.jobs for one in found.values())
        if running or waiting:
            wishes.unload = False
            raise JobError(
                "unavailable",
                f"{name} has {counted(running, 'running job')} and {waiting} in its queues: drain "
                "the worker (chatjobs workers drain NAME), then unload it",
                "model",
            )

    def pin(self, name: str) -> None:
        """Keep a model in memory from now on. Raises JobError if the others would not fit."""
        shares = {other: model.share.total for other, model in self._models.items()}
        pinned = {other for other, one in self._wishes.items() if one.policy.pin or other == name}
        others = [share for other, share in shares.items() if other not in pinned]
        needed = sum(shares[other] for other in pinned) + max(others, default=0)
        if needed > self._budget:
            raise JobError(
                "out_of_memory",
                f"{name} can't be pinned: beside the pinned models there would be no room for the "
                f"largest other one, {size(needed)} of {size(self._budget)}",
                "model",
            )
        self._set_pin(name, pin=True)
        self.request_load(name)

    def unpin(self, name: str) -> None:
        """Let a model make room for others again."""
        self._set_pin(name, pin=False)

    def check_pin(self, name: str) -> None:
        """Raise JobError if a model that was pinned is not to stay after all."""
        if not self._wishes[name].policy.pin:
            raise JobError(
                "unavailable", f"{name} is not pinned: a later command unpins it", "model"
            )

    def _set_pin(self, name: str, *, pin: bool) -> None:
        wishes = self._wishes[name]
        wishes.policy = replace(wishes.policy, pin=pin)

    # --- the loop's rounds ------------------------------------------------------------------------

    def step(self) -> None:
        """Take the result of a swap; plan if it is time to. Raises redis.RedisError, and JobError
        if a model could not be unloaded."""
        now = self._clock()
        if self._executor.follow(now):
            self._next_plan = now + PLAN_SECONDS  # the model that has come in claims first
        self._end_wishes()
        if self._executor.swaps_now or self._stopped or (self._paused() and not self._commanded):
            return
        if (self._complete and not self._executor.holds_lease) or (
            now < self._next_plan and not self._drained()
        ):
            return
        self._next_plan = now + PLAN_SECONDS
        self._executor.carry_out(plan(self._views(now), self._budget, self._max_wait), now)
        self._end_wishes()

    def loaded(self, name: str, info: ModelInfo, seconds: float) -> None:
        """A model was loaded at the start: it claims before others are planned for."""
        self._executor.loaded(name, info, seconds)
        self._next_plan = self._clock() + PLAN_SECONDS

    def waits(self) -> bool:
        """True if a model is on its way, or jobs wait for one. Raises redis.RedisError."""
        moves = self._executor.swaps_now or State.DRAINING in self._served.states.values()
        return moves or self._wanted(self._waiting(self._all_names))

    @property
    def _all_names(self) -> list[str]:
        return [name for one in self._models.values() for name in one.names]

    @property
    def _commanded(self) -> bool:
        """True if an operator waits for a load or an unload."""
        return any(one.load or one.unload for one in self._wishes.values())

    @property
    def _complete(self) -> bool:
        """True if all models are in memory, and stay."""
        return all(
            self.state(name) is State.READY and one.policy.keep_alive == inf and not one.unload
            for name, one in self._wishes.items()
        )

    def _end_wishes(self) -> None:
        """A model that takes jobs is loaded, and one without memory is unloaded."""
        for name, one in self._wishes.items():
            state = self.state(name)
            one.load = one.load and state is not State.READY
            one.unload = one.unload and state.resident

    def _drained(self) -> bool:
        """True if models drain and have no jobs left."""
        draining = [name for name in self._models if self.state(name) is State.DRAINING]
        running = self._jobs.running if draining else {}
        return bool(draining) and not any(running.get(name) for name in draining)

    def _views(self, now: float) -> list[ModelView]:
        # A worker that claims nothing loads for operators only.
        waiting = {} if self._paused() else self._waiting(self._all_names)
        running, used_at = self._jobs.running, self._jobs.used_at
        ready = self._elsewhere.ready() if self._wanted(waiting) else set()
        views = []
        for name, one in self._models.items():
            wishes, history = self._wishes[name], self._executor.histories[name]
            found = [waiting[other] for other in one.names if other in waiting]
            views.append(
                ModelView(
                    name=name,
                    nbytes=one.share.total,
                    state=self.state(name),
                    pinned=wishes.policy.pin,
                    keep_alive=0.0 if wishes.unload else wishes.policy.keep_alive,
                    queued=max(sum(w.jobs for w in found), wishes.load),
                    oldest=inf if wishes.load else max((w.oldest for w in found), default=0.0),
                    running=running.get(name, 0),
                    load_seconds=self._executor.estimate(name),
                    since=inf if wishes.load else now - history.changed_at,
                    idle=now - max(used_at.get(name, -inf), history.changed_at),
                    may_load=now >= history.may_load_at,
                    elsewhere=not (wishes.load or one.names.isdisjoint(ready)),
                )
            )
        return views

    def _wanted(self, waiting: Mapping[str, Waiting]) -> bool:
        return any(
            waiting[name].jobs
            for one in self._models.values()
            if not self.state(one.name).resident
            for name in one.names
            if name in waiting
        )
