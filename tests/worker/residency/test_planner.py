"""Which model comes into memory next, and which make room for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import JobError
from worker.queue.model_state import State
from worker.residency.planner import MIN_LOADS, ModelView, Plan, plan
from worker.residency.policy import keep_alive_seconds

BUDGET = 100
MAX_WAIT = 30.0
SECONDS = st.sampled_from([0.0, 0.5, 2.0, 5.0, 29.0, 31.0, 1000.0])


def view(name: str, state: State = State.COLD, nbytes: int = 60, **fields: Any) -> ModelView:
    return ModelView(name=name, state=state, nbytes=nbytes, **fields)


def ready(name: str, nbytes: int = 60, since: float = 100.0, **fields: Any) -> ModelView:
    return view(name, State.READY, nbytes, since=since, **fields)


def decide(*models: ModelView) -> Plan:
    return plan(models, BUDGET, MAX_WAIT)


@st.composite
def workers(draw: st.DrawFn) -> list[ModelView]:
    """Models of a worker, within the budget."""
    left, models = BUDGET, []
    for number in range(draw(st.integers(1, 5))):
        nbytes = draw(st.integers(1, BUDGET))
        state = draw(st.sampled_from(State))
        if state.resident and nbytes > left:
            state = State.UNLOADED
        left -= nbytes if state.resident else 0
        models.append(
            ModelView(
                name=f"m{number}",
                nbytes=nbytes,
                state=state,
                pinned=draw(st.booleans()),
                keep_alive=draw(st.sampled_from([0.0, 5.0, inf])),
                queued=draw(st.integers(0, 3)),
                oldest=draw(SECONDS),
                running=draw(st.integers(0, 2)) if state.resident else 0,
                load_seconds=draw(st.sampled_from([0.1, 1.0, 20.0])),
                since=draw(SECONDS),
                idle=draw(SECONDS),
                may_load=draw(st.booleans()),
                elsewhere=draw(st.booleans()),
            )
        )
    return models


@given(workers())
def test_no_plan_breaks_the_budget_a_pin_or_a_running_job(models: list[ModelView]) -> None:
    found = decide(*models)
    known = {one.name: one for one in models}
    for name in (*found.unload, *found.drain):
        assert known[name].state in (State.READY, State.DRAINING) and not known[name].pinned
    assert not any(known[name].running for name in found.unload)
    assert not found.drain.intersection(found.unload)
    if found.load is None:
        return
    assert not any(one.state is State.LOADING for one in models)
    loaded = known[found.load]
    assert loaded.queued and loaded.may_load and not loaded.state.resident
    kept = [one for one in models if one.state.resident and one.name not in found.unload]
    assert sum(one.nbytes for one in kept) + loaded.nbytes <= BUDGET
    for name in found.unload:  # none too many
        assert sum(one.nbytes for one in kept) + known[name].nbytes + loaded.nbytes > BUDGET


@given(workers())
def test_models_with_waiting_jobs_go_only_for_one_that_has_waited_too_long(
    models: list[ModelView],
) -> None:
    found = decide(*models)
    known = {one.name: one for one in models}
    for name in (*found.unload, *found.drain):
        one = known[name]
        if one.queued and one.state is not State.DRAINING and found.target is not None:
            assert known[found.target].waits >= MAX_WAIT
            assert one.since >= MIN_LOADS * one.load_seconds


def test_a_model_that_fits_is_loaded_beside_the_others() -> None:
    assert decide(ready("a", 40, queued=5, running=1), view("b", queued=1)) == Plan(
        load="b", target="b"
    )


def test_a_model_without_jobs_makes_room_at_once() -> None:
    assert decide(ready("a", since=0.0), view("b", queued=1)) == Plan(("a",), "b", target="b")


def test_a_model_without_waiting_jobs_drains_to_the_end() -> None:
    wanted = view("b", queued=1, oldest=0.5)
    running = ready("a", running=3, since=0.0)
    assert decide(running, wanted) == Plan(drain=frozenset("a"), target="b")
    comes = view("a", State.DRAINING, running=1, queued=7, since=1.0)  # jobs that came meanwhile
    assert decide(comes, wanted) == Plan(drain=frozenset("a"), target="b")


def test_a_model_with_waiting_jobs_stays_while_nobody_waits_too_long() -> None:
    busy = ready("a", queued=9, running=2)
    assert decide(busy, view("b", queued=1, oldest=MAX_WAIT - 1)) == Plan()
    assert decide(busy, view("b", queued=1, oldest=MAX_WAIT)) == Plan(
        drain=frozenset("a"), target="b"
    )
    waits = ready("a", queued=9)  # between two of its jobs
    assert decide(waits, view("b", queued=1, oldest=MAX_WAIT)) == Plan(("a",), "b", target="b")


def test_a_model_with_waiting_jobs_stays_for_three_of_its_loads() -> None:
    late = view("b", queued=1, oldest=500.0)
    assert decide(ready("a", queued=1, running=1, load_seconds=20, since=59), late) == Plan()
    assert decide(ready("a", queued=1, running=1, load_seconds=20, since=60), late).drain == {"a"}


def test_a_job_does_not_wait_for_its_model_while_that_was_in_memory() -> None:
    backlog = view("b", State.UNLOADED, queued=900, oldest=500.0, since=3.0)
    assert decide(ready("a", queued=1, running=1), backlog) == Plan()


def test_the_model_whose_job_waits_longest_is_next_and_nobody_overtakes_an_overdue_one() -> None:
    late, later = view("b", queued=1, oldest=40.0), view("c", queued=9, oldest=50.0)
    assert decide(late, later).load == "c"
    busy = ready("a", running=1, queued=1, since=1.0)  # too young to go
    assert decide(busy, late, view("small", nbytes=40, queued=1)) == Plan()
    assert decide(busy, view("b", queued=1), view("small", nbytes=40, queued=1)).load == "small"


def test_of_models_without_jobs_the_one_goes_that_is_cheap_to_load_for_its_use() -> None:
    wanted = view("w", queued=1, nbytes=30)
    slow = ready("slow", 40, idle=100.0, load_seconds=50.0)
    quick = ready("quick", 40, idle=20.0, load_seconds=1.0)
    assert decide(slow, quick, wanted).unload == ("quick",)
    assert decide(ready("old", 40, idle=9.0), ready("new", 40, idle=8.0), wanted).unload == ("old",)


def test_pinned_models_stay() -> None:
    assert decide(ready("a", pinned=True), view("b", queued=1, oldest=999.0)) == Plan()
    small = ready("small", 30)
    assert decide(ready("a", 40, pinned=True), small, view("b", queued=1)).unload == ("small",)


@pytest.mark.parametrize(
    ("idle", "keep_alive", "unloaded"),
    [(5.0, 5.0, True), (4.0, 5.0, False), (0.0, 0.0, True), (1e9, inf, False)],
)
def test_keep_alive_is_the_time_without_jobs(
    idle: float, keep_alive: float, unloaded: bool
) -> None:
    one = ready("a", idle=idle, keep_alive=keep_alive)
    assert decide(one) == Plan(unload=("a",) if unloaded else ())
    busy = ready("a", idle=idle, keep_alive=keep_alive, queued=1)
    assert decide(busy) == Plan()


def test_a_second_worker_loads_a_model_only_into_memory_that_nobody_uses() -> None:
    wanted = view("b", queued=1, oldest=500.0, elsewhere=True)
    assert decide(ready("a", queued=1, running=1), wanted) == Plan()
    assert decide(ready("a"), wanted).load == "b"
    young = view("b", queued=1, oldest=0.5, elsewhere=True)
    assert decide(young) == Plan()  # the first worker may be about to claim it


def test_models_that_drain_for_nobody_are_ready_again() -> None:
    draining = view("a", State.DRAINING, queued=3, running=1, since=100.0)
    assert decide(draining, view("b")).drain == frozenset()


@dataclass
class Simulated:
    """One worker whose models exclude each other; one job of a model at a time."""

    load_seconds: float
    service: float
    arrivals: dict[str, list[float]]
    max_wait: float
    now: float = 0.0
    resident: str = ""
    since: float = 0.0
    running_until: float = 0.0
    left: dict[str, float] = field(default_factory=dict)  # when each was unloaded
    longest: float = 0.0  # wait for a model
    swaps: int = 0

    def run(self, until: float, tick: float = 0.25) -> None:
        while self.now < until:
            self.now += tick
            running = self.now < self.running_until
            views = [self.view(name, running) for name in self.arrivals]
            absent = [one for one in views if one.queued and one.name != self.resident]
            self.longest = max([self.longest, *(one.waits for one in absent)])
            found = plan(views, 1, self.max_wait)
            if found.load is not None:
                if self.resident:
                    self.left[self.resident] = self.now
                self.now += self.load_seconds
                self.resident, self.since, self.swaps = found.load, self.now, self.swaps + 1
            elif not (running or self.resident in found.drain) and self.waiting(self.resident):
                self.arrivals[self.resident].pop(0)
                self.running_until = self.now + self.service

    def waiting(self, name: str) -> list[float]:
        return [one for one in self.arrivals.get(name, ()) if one <= self.now]

    def view(self, name: str, running: bool) -> ModelView:
        waiting, here = self.waiting(name), name == self.resident
        return ModelView(
            name=name,
            nbytes=1,
            state=State.READY if here else State.UNLOADED,
            queued=len(waiting),
            oldest=self.now - waiting[0] if waiting else 0.0,
            running=int(here and running),
            load_seconds=self.load_seconds,
            since=self.now - (self.since if here else self.left.get(name, -inf)),
        )


@given(
    st.integers(2, 4),
    st.sampled_from([0.5, 2.0, 8.0]),
    st.sampled_from([0.25, 1.0, 4.0]),
    st.sampled_from([0.0, 5.0, 30.0]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=60),
)
def test_no_job_waits_for_its_model_longer_than_the_bound(
    count: int, load: float, service: float, max_wait: float, jobs: list[tuple[int, int]]
) -> None:
    names = [f"m{number}" for number in range(count)]
    arrivals: dict[str, list[float]] = {name: [] for name in names}
    for number, moment in jobs:
        arrivals[names[number % count]].append(float(moment))
    simulated = Simulated(
        load, service, {one: sorted(at) for one, at in arrivals.items()}, max_wait
    )
    simulated.run(200.0)
    residence = (MIN_LOADS + 1) * load
    bound = max(max_wait, residence) + service + load + (count - 2) * (residence + service)
    assert simulated.longest <= bound + 4 * 0.25 * count  # ticks
    total = 200.0 + load
    assert simulated.swaps * load <= total


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(-1, inf), (0, 0.0), (2.5, 2.5), ("5m", 300.0), ("-1", inf), ("90", 90.0), ("2h", 7200.0)],
)
def test_keep_alive_has_the_values_of_ollama(value: float | str, seconds: float) -> None:
    assert keep_alive_seconds(value) == seconds


@pytest.mark.parametrize("value", ["", "soon", "5 apples", "5d", float("nan")])
def test_any_other_keep_alive_is_refused(value: float | str) -> None:
    with pytest.raises(JobError, match="keep_alive"):
        keep_alive_seconds(value)
