"""Brings models into memory and unloads them while a worker serves.

The loop's thread calls `step` in each round. It changes the state of every model, and carries
out what the planner says. A swap runs on a thread of its own: it unloads first, then loads, so that
two models never share memory that one of them needs. Streams, cancellations and leases go on
meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

from jobs.errors import JobError, failure_of, invalid
from jobs.sizes import counted
from jobs.store.waiting import Waiting
from worker.backend import ModelInfo, SwappingBackend
from worker.model_spec import ModelSpec
from worker.queue.load_figures import LoadFigures
from worker.queue.model_state import State
from worker.queue.served import Served
from worker.queue.worker_status import BudgetedModel, ResidencyStatus
from worker.residency.budget import Share, size
from worker.residency.planner import ModelView, Plan, plan
from worker.residency.policy import Residence

logger = logging.getLogger(__name__)

MAX_WAIT = 30.0  # seconds that a job waits for its model before models with waiting jobs make room
PLAN_SECONDS = 0.5  # between two looks at the queues
LEASE_RENEWAL_SECONDS = 2.0  # between two renewals of the lease of a model that is brought in
LOAD_BYTES_PER_SECOND = 5e8  # of the first load of a model, before one is measured
BACKOFF_SECONDS = (1.0, 60.0)  # after a load that failed: the first pause, the longest
LATE_LOADS = 3.0  # estimates of a load after which it counts as overdue
LEAST_SECONDS = 20.0  # the least estimate for that: a first load may have to download the model
FAILED_LOADS = 3  # in a row, after which the model's jobs fail if no other worker can run them


class Jobs(Protocol):
    """The jobs that run here, by the own names of their models."""

    @property
    def running(self) -> Mapping[str, int]:
        """Their numbers."""

    @property
    def used_at(self) -> Mapping[str, float]:
        """When one began or ended last (monotonic)."""


class Elsewhere(Protocol):
    """What other workers do with the models. All methods raise redis.RedisError."""

    def ready(self) -> set[str]:
        """The models that another worker has in memory, by all their names."""

    def able(self) -> set[str]:
        """The models that another worker serves and whose loads have not failed there."""

    def lease(self, model: str) -> bool:
        """True if no other worker brings this model in: this one does, for some seconds."""

    def release(self, model: str) -> None:
        """Let other workers bring the model in."""


@dataclass(slots=True, eq=False)
class Model:
    """A model that the worker may serve. Its state is that of worker/queue/served.py."""

    name: str
    spec: ModelSpec
    share: Share
    residence: Residence
    changed_at: float = -inf  # monotonic: of its last load or unload
    load_seconds: float = 0.0
    failures: int = 0  # of loads, in a row
    may_load_at: float = -inf  # monotonic
    loads: int = 0
    load_requested: bool = False  # by an operator
    unload_requested: bool = False  # by an operator
    error: JobError | None = None  # of its last load, if that failed

    @property
    def names(self) -> set[str]:
        return {self.name, self.spec.reference, *self.spec.aliases}

    @property
    def estimate(self) -> float:
        """The seconds of its next load."""
        return self.load_seconds or self.share.weights / LOAD_BYTES_PER_SECOND

    @property
    def sized_spec(self) -> ModelSpec:
        return replace(self.spec, cache_bytes=self.share.cache)


@dataclass(slots=True, eq=False)
class Swap:
    """Models that are unloaded, and one that is loaded after that, on another thread. That thread
    sets the last four."""

    unload: Sequence[Model]
    load: Model | None
    began_at: float  # monotonic
    unloading: bool = False
    unloaded: deque[Model] = field(default_factory=deque)
    load_seconds: float = 0.0
    done: Future[ModelInfo | None] = field(default_factory=Future)


def first_models(models: Sequence[Model], budget: int) -> list[ModelSpec]:
    """The models that are loaded at the start: the pinned ones, then those with `preload` in their
    order, as long as they fit."""
    chosen = [one for one in models if one.residence.pin]
    for one in models:
        fits = sum(other.share.total for other in (*chosen, one)) <= budget
        if one.residence.preload and one not in chosen and fits:
            chosen.append(one)
    return [one.sized_spec for one in chosen]


class Residency:
    """Used by the loop's thread.

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
        self._backend, self._served, self._budget = backend, served, budget
        self._models = {model.name: model for model in models}
        self._waiting, self._jobs, self._elsewhere = waiting, jobs, elsewhere
        self._max_wait, self._on_ready, self._wake = max_wait, on_ready, wake
        self._paused, self._clock = paused, clock
        self._swap: Swap | None = None
        self._next_plan = -inf  # monotonic
        self._leased: str | None = None  # the model whose lease this worker holds
        self._renew_at = -inf  # monotonic
        self._stopped = False
        self._evictions = self._swaps = 0
        # Monotonic: since then this worker brings the leased model in, or makes room for it.
        self._target_since: float | None = None

    # --- what others ask --------------------------------------------------------------------------

    def status(self) -> ResidencyStatus:
        """The part of the worker's status that is about models which come and go."""
        models = self._models.values()
        return ResidencyStatus(
            models={
                one.name: BudgetedModel(one.share.weights, one.share.total, one.residence.pin)
                for one in models
            },
            failing=[one.name for one in models if one.failures >= FAILED_LOADS],
            loads=sum(one.loads for one in models),
            evictions=self._evictions,
        )

    def figures(self) -> LoadFigures:
        """The figures of loads. Any thread may call it."""
        now, swap = self._clock(), self._swap
        begin = self._target_since
        late = ""
        if swap is not None and swap.load is not None:
            seconds = now - swap.began_at
            allowed = LATE_LOADS * max(swap.load.estimate, LEAST_SECONDS)
            if seconds > allowed:
                late = f"the load of {swap.load.name} has taken {seconds:.0f} s, not {allowed:.0f}"
        return LoadFigures(
            loads=sum(one.loads for one in self._models.values()),
            evictions=self._evictions,
            swaps=self._swaps,
            blocked_seconds=0.0 if begin is None else now - begin,
            overdue=late,
        )

    @property
    def settled(self) -> bool:
        """True unless a model is on its way into memory or out of it."""
        return self._swap is None and State.DRAINING not in self._served.states.values()

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
        one = self._models[name]
        return {"model": name, "state": self.state(name).value, "pinned": one.residence.pin}

    def request_load(self, name: str) -> None:
        """Bring a model in, as for a job that has waited for too long."""
        one = self._models[name]
        if self.state(name) is not State.READY:
            one.load_requested, one.error, one.may_load_at = True, None, -inf
        one.unload_requested = False
        self._next_plan = -inf

    def check_load(self, name: str) -> None:
        """Raise JobError if a load that was requested has failed, or is not to come after all."""
        one = self._models[name]
        if one.error is not None:
            one.load_requested = False
            raise one.error
        if not one.load_requested and self.state(name) is not State.READY:
            raise JobError(
                "unavailable", f"{name} is not loaded: a later command unloads it", "model"
            )

    def request_unload(self, name: str) -> None:
        """Unload a model at once. Raises JobError if it is pinned, or has jobs."""
        one = self._models[name]
        if one.residence.pin:
            raise invalid(f"{name} is pinned: unpin it first", "model")
        if self.state(name).resident:
            one.unload_requested, one.load_requested = True, False
            self._next_plan = -inf
            self.check_unload(name)

    def check_unload(self, name: str) -> None:
        """Raise JobError if a model whose unload was requested has jobs, or is to stay after all.
        Jobs in its queues do not count while the worker claims none."""
        one = self._models[name]
        if self.state(name) is not State.READY:
            return
        if not one.unload_requested:
            raise JobError(
                "unavailable", f"{name} stays in memory: a later command loads or pins it", "model"
            )
        running = self._jobs.running.get(name, 0)
        found = {} if self._paused() else self._waiting([*one.names])
        waiting = sum(one.jobs for one in found.values())
        if running or waiting:
            one.unload_requested = False
            raise JobError(
                "unavailable",
                f"{name} has {counted(running, 'running job')} and {waiting} in its queues: drain "
                "the worker (chatjobs workers drain NAME), then unload it",
                "model",
            )

    def pin(self, name: str) -> None:
        """Keep a model in memory from now on. Raises JobError if the others would not fit."""
        one = self._models[name]
        pinned = [other for other in self._models.values() if other.residence.pin or other is one]
        others = [other.share.total for other in self._models.values() if other not in pinned]
        needed = sum(other.share.total for other in pinned) + max(others, default=0)
        if needed > self._budget:
            raise JobError(
                "out_of_memory",
                f"{name} can't be pinned: beside the pinned models there would be no room for the "
                f"largest other one, {size(needed)} of {size(self._budget)}",
                "model",
            )
        one.residence = replace(one.residence, pin=True)
        self.request_load(name)

    def unpin(self, name: str) -> None:
        """Let a model make room for others again."""
        self._models[name].residence = replace(self._models[name].residence, pin=False)

    # --- the loop's rounds ------------------------------------------------------------------------

    def step(self) -> None:
        """Take the result of a swap; plan if it is time to. Raises redis.RedisError."""
        now = self._clock()
        if self._swap is not None:
            self._follow(self._swap, now)
        if self._swap is not None or self._stopped or (self._paused() and not self._commanded):
            return
        if (self._complete and self._leased is None) or (
            now < self._next_plan and not self._drained()
        ):
            return
        self._next_plan = now + PLAN_SECONDS
        for one in self._models.values():
            if one.failures and now >= one.may_load_at:
                self._served.accept(one.name)  # the next load may work
        self._carry_out(plan(self._views(now), self._budget, self._max_wait), now)

    def waits(self) -> bool:
        """True if a model is on its way, or jobs wait for one. Raises redis.RedisError."""
        return not self.settled or self._wanted(self._waiting(self._all_names))

    @property
    def _all_names(self) -> list[str]:
        return [name for one in self._models.values() for name in one.names]

    @property
    def _commanded(self) -> bool:
        """True if an operator waits for a load or an unload."""
        return any(one.load_requested or one.unload_requested for one in self._models.values())

    @property
    def _complete(self) -> bool:
        """True if all models are in memory, and stay."""
        return all(
            self.state(one.name) is State.READY
            and one.residence.keep_alive == inf
            and not one.unload_requested
            for one in self._models.values()
        )

    def _follow(self, swap: Swap, now: float) -> None:
        """Take what a swap has done."""
        over = swap.done.done()  # first: nothing is unloaded after it
        while swap.unloaded:
            one = swap.unloaded.popleft()
            self._served.enter(one.name, State.UNLOADED)
            one.changed_at, one.unload_requested = now, False
            self._evictions += 1
        if over:
            self._swap = None
            self._swapped(swap, now)
        elif self._leased is not None and now >= self._renew_at:
            self._take_lease_of(self._leased, now)

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
        for one in self._models.values():
            found = [waiting[name] for name in one.names if name in waiting]
            views.append(
                ModelView(
                    name=one.name,
                    nbytes=one.share.total,
                    state=self.state(one.name),
                    pinned=one.residence.pin,
                    keep_alive=0.0 if one.unload_requested else one.residence.keep_alive,
                    queued=max(sum(w.jobs for w in found), one.load_requested),
                    oldest=inf
                    if one.load_requested
                    else max((w.oldest for w in found), default=0.0),
                    running=running.get(one.name, 0),
                    load_seconds=one.estimate,
                    since=inf if one.load_requested else now - one.changed_at,
                    idle=now - max(used_at.get(one.name, -inf), one.changed_at),
                    may_load=now >= one.may_load_at,
                    elsewhere=not (one.load_requested or one.names.isdisjoint(ready)),
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

    def _carry_out(self, plan: Plan, now: float) -> None:
        before = self._leased
        self._take_lease_of(plan.target, now)
        if self._leased is None:
            self._target_since = None
        elif self._target_since is None or self._leased != before:
            self._target_since = now
        if plan.target is not None and self._leased is None:
            self._models[plan.target].may_load_at = now + BACKOFF_SECONDS[0]
            return  # another worker brings it in
        for name, one in self._models.items():
            state = self.state(name)
            if state is State.READY and name in plan.drain:
                logger.info("%s takes no more jobs, to make room for %s", name, plan.target)
                self._served.enter(name, State.DRAINING)
            elif state is State.DRAINING and name not in (*plan.drain, *plan.unload):
                one.load_requested = False
                self._served.enter(name, State.READY)
                self._on_ready()
        if plan.unload or plan.load is not None:
            self._begin(plan)

    def _take_lease_of(self, target: str | None, now: float) -> None:
        if self._leased is not None and self._leased != target:
            self._elsewhere.release(self._leased)
            self._leased = None
        if target is not None:
            self._renew_at = now + LEASE_RENEWAL_SECONDS
            self._leased = target if self._elsewhere.lease(target) else None

    def _begin(self, plan: Plan) -> None:
        unload = [self._models[name] for name in plan.unload]
        for one in unload:
            self._served.enter(one.name, State.DRAINING)
        load = None if plan.load is None else self._models[plan.load]
        if load is not None:
            logger.info("loading %s", load.name)
            self._served.enter(load.name, State.LOADING)
        self._swap = swap = Swap(unload, load, self._clock())
        threading.Thread(target=self._run, args=(swap,), name="residency", daemon=True).start()

    def _run(self, swap: Swap) -> None:
        """Download, unload, then load; on a thread of its own."""
        try:
            if swap.load is not None:
                self._backend.fetch(swap.load.spec)
            swap.unloading = True
            for one in swap.unload:
                self._backend.unload(one.name)
                swap.unloaded.append(one)
            swap.unloading = False
            begin = self._clock()
            info = None if swap.load is None else self._backend.load(swap.load.sized_spec)
            swap.load_seconds = self._clock() - begin
            swap.done.set_result(info)
        except BaseException as error:  # raised again by the loop's thread
            swap.done.set_exception(error)
        self._wake()

    def _swapped(self, swap: Swap, now: float) -> None:
        one, self._target_since = swap.load, None
        try:
            info = swap.done.result()
        except BaseException as error:
            if one is None or swap.unloading:
                raise  # a model could not be unloaded
            self._failed(one, failure_of(error), now)
            return
        if one is not None and info is not None:
            logger.info("loaded %s in %.1f s", one.name, swap.load_seconds)
            self._swaps += bool(swap.unload)
            self.loaded(one.name, info, swap.load_seconds)

    def loaded(self, name: str, info: ModelInfo, seconds: float) -> None:
        """A model is in memory: it takes jobs."""
        one = self._models[name]
        one.load_seconds, one.failures, one.loads = seconds, 0, one.loads + 1
        one.load_requested = False
        one.changed_at = self._clock()
        self._served.add(info, one.spec.aliases)
        self._next_plan = one.changed_at + PLAN_SECONDS  # it claims first
        self._on_ready()

    def _failed(self, one: Model, error: JobError, now: float) -> None:
        first, longest = BACKOFF_SECONDS
        one.failures += 1
        one.error, one.unload_requested = error, False
        pause = min(longest, first * 2 ** min(one.failures - 1, 20))
        self._served.enter(one.name, State.UNLOADED if one.loads else State.COLD)
        one.may_load_at = now + pause
        logger.error("loading %s failed: %s (again in %.0f s)", one.name, error.message, pause)
        self._take_lease_of(None, now)  # another worker may try it
        if one.failures >= FAILED_LOADS and one.names.isdisjoint(self._elsewhere.able()):
            self._served.refuse(one.name, error)
            self._on_ready()
