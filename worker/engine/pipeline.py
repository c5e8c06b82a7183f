"""Gives steps to the device. One that overlaps steps gets the next one before the result of the
last one is read (docs/decisions/overlapped-steps.md): as a whole, or up to its logits if the draw
depends on that result."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from torch import Tensor

from worker.engine.recovery import first_line
from worker.engine.runner import ModelRunner, UnreadResult
from worker.engine.scheduled import ScheduledSequence
from worker.engine.scheduler import Scheduler
from worker.ranks.leader import RanksLost

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device was given, and that is not committed yet."""

    scheduled: SequenceOf[ScheduledSequence]
    result: UnreadResult


@dataclass(frozen=True, slots=True)
class Undrawn:
    """A step of which the device was given the forward pass. Its tokens are drawn when the step
    before it is committed."""

    scheduled: SequenceOf[ScheduledSequence]
    logits: Tensor


class Pipeline:
    """Owns the step that is in flight between two steps of the engine. Used by the thread that
    steps the engine."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, *, overlaps: bool) -> None:
        self.launched = 0  # steps
        self.in_flight: Launched | Undrawn | None = None
        self.overlaps = overlaps
        self._scheduler, self._runner = scheduler, runner

    def next(self) -> Launched | None:
        """The step to read and commit now; None if there is nothing to run. The one after it is in
        flight from now on, if it can be."""
        step = self.in_flight or self._launch()
        if isinstance(step, Undrawn):
            result = self._runner.draw(step.logits, self._scheduler.sampling())
            step = Launched(step.scheduled, result)
        if step is not None:
            self.in_flight = self._launch_following(step) if self.overlaps else None
        return step

    def forget(self) -> None:
        """Forget the step in flight, whose tokens no sequence gets."""
        self.in_flight = None

    def reset(self) -> None:
        """Begin anew after a step that ended anywhere."""
        self.forget()
        self._scheduler.reset()

    def _launch(self) -> Launched | None:
        plan = self._scheduler.schedule()
        if not plan.spans:
            self._runner.apply(plan.changes)
            return None
        self.launched += 1
        logits = self._runner.forward(plan)
        result = self._runner.draw(logits, self._scheduler.sampling())
        return Launched(self._scheduler.scheduled, result)

    def _launch_following(self, step: Launched) -> Launched | Undrawn | None:
        token_ids = step.result.token_ids
        if token_ids is None:
            return None
        following = self._scheduler.follow(step.scheduled)
        if following is None:
            return None
        self._runner.apply(self._scheduler.book.take_changes())
        try:
            logits = self._runner.follow(following, token_ids)
            scheduled = self._scheduler.scheduled
            next_step: Launched | Undrawn = Undrawn(scheduled, logits)
            if all(one.foreseeable for one in scheduled):
                result = self._runner.draw(logits, self._scheduler.sampling(ahead=1))
                next_step = Launched(scheduled, result)
        except RanksLost:
            raise
        except Exception as error:
            self._forgo(error)
            return None
        self.launched += 1
        return next_step

    def _forgo(self, error: Exception) -> None:
        """A step can't be launched before the last one is read, which counts nevertheless. It is
        planned anew afterwards, and whoever causes the error fails in it."""
        logger.warning("a step waits for the one before it: %s", first_line(error))
