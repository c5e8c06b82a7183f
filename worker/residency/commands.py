"""The commands with which an operator brings models into memory: load, unload, pin and unpin."""

from __future__ import annotations

from collections.abc import Mapping

from jobs.errors import JobError, invalid
from worker.queue.model_state import State
from worker.queue.operator_commands import Facts, Handler, Task
from worker.residency.manager import Residency


class ModelCommands:
    """Used by the loop's thread. Each command has the argument `model`, any name of a model of the
    worker, and ends with its own name (`model`), its `state` and whether it is `pinned`. None: the
    worker has no budget, and its models always are in memory."""

    def __init__(self, residency: Residency | None) -> None:
        self._residency = residency

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "load": self._load,
            "unload": self._unload,
            "pin": self._pin,
            "unpin": self._unpin,
        }

    def _load(self, args: Facts) -> Task:
        residency, name = self._of(args)
        residency.request_load(name)
        yield from self._until_ready(residency, name)
        return residency.facts(name)

    def _unload(self, args: Facts) -> Task:
        residency, name = self._of(args)
        residency.request_unload(name)
        while residency.state(name).resident:
            residency.check_unload(name)
            yield None
        return residency.facts(name)

    def _pin(self, args: Facts) -> Task:
        residency, name = self._of(args)
        residency.pin(name)
        try:
            yield from self._until_ready(residency, name)
        except JobError as error:
            residency.unpin(name)
            raise JobError(
                error.code, f"{name} is not pinned: {error.message}", error.param
            ) from None
        residency.check_pin(name)
        return residency.facts(name)

    def _unpin(self, args: Facts) -> Task:
        residency, name = self._of(args)
        residency.unpin(name)
        yield from ()
        return residency.facts(name)

    def _until_ready(self, residency: Residency, name: str) -> Task:
        said: State | None = None
        while (state := residency.state(name)) is not State.READY:
            residency.check_load(name)
            yield None if state is said else residency.facts(name)
            said = state
        return residency.facts(name)

    def _of(self, args: Facts) -> tuple[Residency, str]:
        if self._residency is None:
            raise invalid(
                "this worker was started without --memory: its models always are in memory", "model"
            )
        return self._residency, self._residency.own_name(args.get("model"))
