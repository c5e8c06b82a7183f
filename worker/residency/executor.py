"""Carries out the plans of worker/residency/planner.py: takes the lease of the model that comes in,
drains those that make room, and swaps. One swap at a time runs, on a thread of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol

from jobs.errors import JobError
from worker.backend import ModelInfo, SwappingBackend
from worker.queue.load_figures import LoadFigures
from worker.queue.model_state import State
from worker.queue.served import Served
from worker.residency.model import Model
from worker.residency.planner import Plan
from worker.residency.swap import Loaded, LoadFailed, Swap, Unloaded, UnloadFailed

logger = logging.getLogger(__name__)

LEASE_RENEWAL_SECONDS = 2.0  # between two renewals of the lease of a model that is brought in
LOAD_BYTES_PER_SECOND = 5e8  # of the first load of a model, before one is measured
BACKOFF_SECONDS = (1.0, 60.0)  # after a load that failed: the first pause, the longest
LATE_LOADS = 3.0  # estimates of a load after which it counts as overdue
LEAST_SECONDS = 20.0  # the least estimate for that: a first load may have to download the model
FAILED_LOADS = 3  # in a row, after which the model's jobs fail if no other worker can run them


class Elsewhere(Protocol):
    """What other workers do with the models. All methods raise redis.RedisError."""

    def ready(self) -> set[str]:
        """The models that another worker has in memory, by all their names."""

    def able(self) -> set[str] | None:
        """The models that another worker serves and whose loads have not failed there; None if that
        is not known now."""

    def lease(self, model: str) -> bool:
        """True if no other worker brings this model in: this one does, for some seconds."""

    def release(self, model: str) -> None:
        """Let other workers bring the model in."""


@dataclass(slots=True, eq=False)
class LoadHistory:
    """The loads of one model, and its next one. Times are monotonic."""

    changed_at: float = -inf  # of its last load or unload
    seconds: float = 0.0  # of its last load; 0 before one
    loads: int = 0
    failures: int = 0  # in a row
    error: JobError | None = None  # of its last load, if that failed
    may_load_at: float = -inf


class PlanExecutor:
    """Owns the swap that runs, the lease of its model and the history of the loads; changes the
    states of models. Used by the loop's thread.

    on_ready: called when a model takes jobs. wake: called by the swap's thread when it ends.
    """

    def __init__(
        self,
        backend: SwappingBackend,
        served: Served,
        models: Mapping[str, Model],
        elsewhere: Elsewhere,
        *,
        on_ready: Callable[[], None],
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._backend, self._served, self._models = backend, served, models
        self._elsewhere, self._clock = elsewhere, clock
        self._on_ready, self._wake = on_ready, wake
        self.histories: Mapping[str, LoadHistory] = {name: LoadHistory() for name in models}
        self._swap: Swap | None = None
        self._leased: str | None = None  # the model whose lease this worker holds
        self._renew_at = -inf  # monotonic
        # Monotonic: since then this worker brings the leased model in, or makes room for it.
        self._target_since: float | None = None
        self.evictions = self._swaps = 0

    @property
    def loads(self) -> int:
        """The models that were loaded since the start."""
        return sum(one.loads for one in self.histories.values())

    @property
    def swaps_now(self) -> bool:
        """True while a swap runs: no other plan is carried out."""
        return self._swap is not None

    @property
    def holds_lease(self) -> bool:
        """True until the plan after the one that has brought a model in."""
        return self._leased is not None

    def estimate(self, name: str) -> float:
        """The seconds of a model's next load."""
        weights = self._models[name].share.weights
        return self.histories[name].seconds or weights / LOAD_BYTES_PER_SECOND

    def figures(self) -> LoadFigures:
        """The figures of loads. Any thread may call it."""
        now, swap = self._clock(), self._swap
        begin = self._target_since
        late = ""
        if swap is not None and swap.loads is not None:
            seconds = now - swap.began_at
            allowed = LATE_LOADS * max(self.estimate(swap.loads), LEAST_SECONDS)
            if seconds > allowed:
                late = f"the load of {swap.loads} has taken {seconds:.0f} s, not {allowed:.0f}"
        return LoadFigures(
            loads=self.loads,
            evictions=self.evictions,
            swaps=self._swaps,
            blocked_seconds=0.0 if begin is None else now - begin,
            overdue=late,
        )

    def forget_failure(self, name: str) -> None:
        """Let the next plan load a model whose last load has failed."""
        self.histories[name].error, self.histories[name].may_load_at = None, -inf

    def follow(self, now: float) -> bool:
        """Take what a swap has done. True if a model was loaded. Raises redis.RedisError, and
        JobError if a model could not be unloaded."""
        loaded, swap = False, self._swap
        if swap is None:
            return False
        for event in swap.events():
            if isinstance(event, Unloaded):
                self._served.enter(event.name, State.UNLOADED)
                self.histories[event.name].changed_at = now
                self.evictions += 1
                continue
            self._swap = self._target_since = None
            match event:
                case Loaded(name, info, seconds):
                    logger.info("loaded %s in %.3f s", name, seconds)
                    self._swaps += swap.unloads
                    self.loaded(name, info, seconds)
                    loaded = True
                case LoadFailed(name, error):
                    self._failed(name, error, now)
                case UnloadFailed(error):
                    raise error
        if self._swap is not None and self._leased is not None and now >= self._renew_at:
            self._take_lease_of(self._leased, now)
        return loaded

    def carry_out(self, plan: Plan, now: float) -> None:
        """Begin what a plan says, unless another worker brings its model in. Raises
        redis.RedisError."""
        for name, history in self.histories.items():
            if history.failures and now >= history.may_load_at:
                self._served.accept(name)  # the next load may work
        before = self._leased
        self._take_lease_of(plan.target, now)
        if self._leased is None:
            self._target_since = None
        elif self._target_since is None or self._leased != before:
            self._target_since = now
        if plan.target is not None and self._leased is None:
            self.histories[plan.target].may_load_at = now + BACKOFF_SECONDS[0]
            return
        for name, state in self._served.states.items():
            if state is State.READY and name in plan.drain:
                logger.info("%s takes no more jobs, to make room for %s", name, plan.target)
                self._served.enter(name, State.DRAINING)
            elif state is State.DRAINING and name not in (*plan.drain, *plan.unload):
                self._served.enter(name, State.READY)
                self._on_ready()
        if plan.unload or plan.load is not None:
            self._begin(plan)

    def loaded(self, name: str, info: ModelInfo, seconds: float) -> None:
        """A model is in memory: it takes jobs."""
        history = self.histories[name]
        history.seconds, history.failures = seconds, 0
        history.loads, history.changed_at = history.loads + 1, self._clock()
        self._served.add(info, self._models[name].spec.aliases)
        self._on_ready()

    def _begin(self, plan: Plan) -> None:
        for name in plan.unload:
            self._served.enter(name, State.DRAINING)
        load = None
        if plan.load is not None:
            logger.info("loading %s", plan.load)
            self._served.enter(plan.load, State.LOADING)
            load = self._models[plan.load]
        self._swap = Swap(self._backend, plan.unload, load, wake=self._wake, clock=self._clock)

    def _failed(self, name: str, error: JobError, now: float) -> None:
        history, (first, longest) = self.histories[name], BACKOFF_SECONDS
        history.failures += 1
        history.error = error
        pause = min(longest, first * 2 ** min(history.failures - 1, 20))
        history.may_load_at = now + pause
        self._served.enter(name, State.UNLOADED if history.loads else State.COLD)
        logger.error("loading %s failed: %s (again in %.0f s)", name, error.message, pause)
        self._take_lease_of(None, now)  # another worker may try it
        names = self._models[name].names
        if history.failures < FAILED_LOADS:
            return
        able = self._elsewhere.able()
        if able is not None and names.isdisjoint(able):
            self._served.refuse(name, error)
            self._on_ready()

    def _take_lease_of(self, target: str | None, now: float) -> None:
        if self._leased is not None and self._leased != target:
            self._elsewhere.release(self._leased)
            self._leased = None
        if target is not None:
            self._renew_at = now + LEASE_RENEWAL_SECONDS
            self._leased = target if self._elsewhere.lease(target) else None
