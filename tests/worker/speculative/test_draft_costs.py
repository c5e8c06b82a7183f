"""When drafts are tried, go on and pause, on a clock that the tests move."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from jobs.api.sampling import Sampling
from tests.worker.checkpoints import make_checkpoint
from worker import Engine
from worker.speculative.draft_costs import (
    ENOUGH,
    LONGEST_PAUSE,
    PROBE_STEPS,
    REFRESH,
    SAVED,
    SHARE,
    DraftCosts,
)


class Steps:
    """Steps of an engine whose sequences draft 4 tokens each, if they may. `found`: seconds until
    the drafts are there."""

    def __init__(self) -> None:
        self.now, self.lost, self.looks = 0.0, 0.0, 0
        self.costs = DraftCosts(lambda: self.now)

    def step(
        self,
        batch: int,
        *,
        plain: float,
        token: float,
        right: int,
        found: float = 0.0,
        whole: bool = True,
        finds: bool = True,
    ) -> bool:
        """One step, whose drafts have so many right tokens each. Returns whether it had some."""
        drafts = not self.costs.pauses(batch) and self._looks(batch, whole)
        if drafts:
            self.now += found
            self.lost += found
            self.costs.proposed()
        drafted = 4 * batch if drafts and finds else 0
        self.now += plain + drafted * token
        if drafted:
            self.lost += drafted * token - right * plain
        self.costs.end(drafted, right * batch if drafted else 0)
        return drafted > 0

    def _looks(self, batch: int, whole: bool) -> bool:
        self.looks += 1
        return self.costs.begin(batch, whole=whole)


@pytest.mark.parametrize(
    ("token", "found"), [(0.06, 0.0), (0.2, 0.0), (2.0, 0.0), (0.01, 3.0), (0.0, 50.0)]
)
def test_drafts_that_never_pay_take_a_share_of_the_time(token: float, found: float) -> None:
    steps, random_ = Steps(), random.Random(1)
    most, sizes = found + 4 * 16 * token, (16, 16, 16, 16, 9, 3)
    for count in range(1, 20_001):
        batch = random_.choice(sizes)
        steps.step(
            batch, plain=1.0, token=token, right=0, found=found, whole=random_.random() < 0.9
        )
        if count in (100, 1000, 20_000):
            # Each size may have one trial that has begun.
            assert steps.lost <= SHARE * steps.now + 3 * PROBE_STEPS * most
    assert steps.lost <= 2 * SHARE * steps.now + PROBE_STEPS * most
    assert steps.looks < 0.3 * 20_000  # most steps do nothing for it


def test_drafts_that_begin_to_lose_take_no_more_than_was_saved_up() -> None:
    steps = Steps()
    for _ in range(2000):
        steps.step(1, plain=1.0, token=0.1, right=3)
    gained, began = -steps.lost, steps.now
    assert gained > 1000
    for _ in range(2000):
        steps.step(1, plain=1.0, token=0.5, right=1)
    assert steps.lost + gained <= SHARE * (steps.now - began + SAVED) + PROBE_STEPS * 3.0


def test_looking_that_finds_nothing_takes_a_share_of_the_time() -> None:
    steps = Steps()
    for _ in range(10_000):
        steps.step(8, plain=1.0, token=0.1, right=3, found=0.2, finds=False)
    assert 0 < steps.lost <= SHARE * steps.now + 0.2


def test_drafts_go_on_where_they_gain_and_pause_where_they_lose() -> None:
    steps = Steps()
    for batch in (1, 16):
        for _ in range(ENOUGH + PROBE_STEPS):
            steps.step(batch, plain=1.0, token=0.1, right=3)
    alone = [steps.step(1, plain=1.0, token=0.1, right=3) for _ in range(REFRESH // 2)]
    many = [steps.step(16, plain=1.0, token=0.1, right=3) for _ in range(REFRESH // 2)]
    assert set(alone) == {True}
    assert many.count(True) <= PROBE_STEPS


def test_a_draft_that_computes_prompts_in_its_first_step_is_not_judged_by_it() -> None:
    steps = Steps()
    for _ in range(ENOUGH):
        assert not steps.step(16, plain=1.0, token=0.01, right=3)
    assert steps.step(16, plain=1.0, token=0.01, right=3, found=100.0)
    assert all(steps.step(16, plain=1.0, token=0.01, right=3) for _ in range(REFRESH // 2))


def test_a_step_without_drafts_is_measured_again() -> None:
    steps = Steps()
    found = [steps.step(4, plain=1.0, token=0.01, right=3) for _ in range(3 * REFRESH)]
    assert 2 <= found[ENOUGH:].count(False) <= 3


def test_a_pause_ends_when_drafts_gain() -> None:
    steps = Steps()
    for _ in range(1000):
        steps.step(8, plain=1.0, token=0.2, right=3)
    found = [steps.step(8, plain=1.0, token=0.01, right=3) for _ in range(2 * LONGEST_PAUSE)]
    assert found[-1]


def test_nothing_is_drafted_in_steps_that_compute_prompts() -> None:
    steps = Steps()
    for _ in range(100):
        assert not steps.step(8, plain=1.0, token=0.01, right=3, whole=False)
    for _ in range(ENOUGH + PROBE_STEPS):
        steps.step(8, plain=1.0, token=0.01, right=3)
    assert not steps.step(8, plain=1.0, token=0.01, right=3, whole=False)
    assert steps.step(8, plain=1.0, token=0.01, right=3)


def test_an_engine_whose_drafts_cost_too_much_seldom_asks_the_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock by which each token of a step takes a second."""
    model = str(make_checkpoint(tmp_path / "model"))
    engine = Engine.load(model, device="cpu", dtype="fp32", max_batch=4, draft=model)
    core, now = engine._core, [0.0]
    core.speculation._costs = DraftCosts(lambda: now[0])
    forward, proposer, asked = core.runner.model, core.speculation._proposer, []
    assert proposer is not None
    propose = proposer.propose

    def timed(batch: Any, caches: Any) -> Any:
        now[0] += len(batch.token_ids)
        return forward(batch, caches)

    def watched(wanted: Any) -> Any:
        asked.append(core.steps)
        now[0] += 4.0 * len(wanted)
        return propose(wanted)

    monkeypatch.setattr(core.runner, "model", timed)
    monkeypatch.setattr(proposer, "propose", watched)
    sampling = Sampling(temperature=0, max_tokens=200, ignore_eos=True)
    prompts = [[*range(5, 25)], [*range(6, 26)], [*range(7, 27)], [*range(8, 28)]]
    for _ in range(3):
        engine.generate(prompts, sampling)
    assert core.steps > 500
    assert 0 < len(asked) <= 3 * PROBE_STEPS
