"""The models that a worker serves: their names, and the state of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from jobs.errors import JobError
from jobs.results.model_versions import ModelVersion
from jobs.results.rows import provenance_columns
from worker.backend import ModelInfo
from worker.queue.model_state import State


class Served(Mapping[str, str]):
    """Owns the set of models: the own name of each, by each name that has queues, which are the
    model's own name, the reference that it is loaded by, and its aliases. Whoever needs the models
    asks it each time, and keeps no copy.

    A model that is not in memory has queues as well. Jobs are claimed only for the models that are
    ready: those are open. The loop's thread changes the set; any thread may read it.
    """

    def __init__(self, models: Iterable[ModelInfo] = ()) -> None:
        self.provenance: dict[str, dict[str, Any]] = {}
        # All of these are replaced, never changed.
        self._further: dict[str, tuple[str, ...]] = {}  # names, by the own name
        self._by_name: dict[str, str] = {}
        self._states: dict[str, State] = {}
        self._refused: dict[str, JobError] = {}
        self._infos: dict[str, ModelInfo] = {}  # as of the last load
        for model in models:
            self.add(model)

    def register(self, name: str, further: Iterable[str]) -> None:
        """Have queues for a model, which is cold. `further`: its other names."""
        self.enter(name, State.COLD)  # first: another thread finds a state for each name
        self._name(name, further)

    def add(self, model: ModelInfo, aliases: Iterable[str] = ()) -> None:
        """Serve a model that the backend has loaded. `aliases`: further names."""
        further = (model.reference, *aliases)
        self.enter(model.name, State.READY)
        self._name(model.name, further)
        self.provenance |= dict.fromkeys((*further, model.name), asdict(model))
        self._infos = {**self._infos, model.name: model}

    def state(self, name: str) -> State:
        """The state of the model with this own name."""
        return self._states[name]

    def enter(self, name: str, state: State) -> None:
        """Change the state of a model. One that takes memory is not refused any more."""
        if state.resident:
            self.accept(name)
        self._states = {**self._states, name: state}

    @property
    def states(self) -> dict[str, State]:
        """The state of each model, by its own name."""
        return self._states

    def refuse(self, name: str, error: JobError) -> None:
        """Claim the jobs of a model that can't be loaded, and fail them."""
        self._refused = {**self._refused, name: error}

    def accept(self, name: str) -> None:
        """End `refuse`."""
        self._refused = {one: error for one, error in self._refused.items() if one != name}

    def refusal(self, name: str) -> JobError | None:
        """The error with which the jobs of a model fail; `name`: any of its names."""
        return self._refused.get(self._by_name.get(name, name))

    def is_open(self, name: str) -> bool:
        """True if jobs are claimed for a model; `name`: any of its names."""
        return name in self.open_names

    @property
    def names(self) -> dict[str, list[str]]:
        """All names of each model, by its own name."""
        return {name: sorted({name, *others}) for name, others in self._further.items()}

    @property
    def weight_bytes(self) -> dict[str, int]:
        """The bytes of the weights of each model that was loaded, by its own name."""
        return {name: info.weight_bytes for name, info in self._infos.items()}

    @property
    def versions(self) -> dict[str, ModelVersion]:
        """The version of each model as of its last load, by each name that has queues."""
        known = {name: self.provenance[name] for name in self if name in self.provenance}
        return {name: ModelVersion.of(provenance_columns(one)) for name, one in known.items()}

    @property
    def open_models(self) -> list[ModelInfo]:
        """The models whose jobs are claimed to run, as of their last load."""
        return [info for name, info in self._infos.items() if self._states[name] is State.READY]

    @property
    def open_names(self) -> dict[str, str]:
        """The own name of each model whose jobs are claimed to run, by each name of it."""
        return {
            name: own for name, own in self._by_name.items() if self._states[own] is State.READY
        }

    @property
    def contexts(self) -> dict[str, int]:
        """The tokens that a sequence may have, by each name of the models whose jobs are claimed to
        run."""
        return {name: self._infos[own].context_length for name, own in self.open_names.items()}

    @property
    def templates(self) -> dict[str, bool]:
        """Whether requests may bring a chat template, by each name of the models that were
        loaded."""
        known = {name: self._infos.get(own) for name, own in self._by_name.items()}
        return {name: info.takes_templates for name, info in known.items() if info is not None}

    @property
    def refused_names(self) -> dict[str, str]:
        """The own name of each model whose jobs are claimed to fail, by each name."""
        return {name: own for name, own in self._by_name.items() if own in self._refused}

    def _name(self, name: str, further: Iterable[str]) -> None:
        self._further = {**self._further, name: tuple(further)}
        by_others = {other: own for own, others in self._further.items() for other in others}
        self._by_name = by_others | {own: own for own in self._further}

    def __getitem__(self, name: str) -> str:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)
