"""The models that a worker serves: their names, and which of them take jobs now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from jobs.errors import JobError
from jobs.results.model_versions import ModelVersion
from jobs.results.rows import provenance_columns
from worker.backend import ModelInfo


class Served(Mapping[str, str]):
    """Owns the set of models: the own name of each, by each name that has queues, which are the
    model's own name, the reference that it is loaded by, and its aliases. Whoever needs the models
    asks it each time, and keeps no copy.

    A model that is not in memory has queues as well, but is not open: no jobs are claimed for it.
    The loop's thread changes the set; any thread may read it.
    """

    def __init__(self, models: Iterable[ModelInfo] = ()) -> None:
        # The rows of jobs that still run when their model is removed need its provenance.
        self.provenance: dict[str, dict[str, Any]] = {}
        # All of these are replaced, never changed.
        self._further: dict[str, tuple[str, ...]] = {}  # names, by the own name
        self._by_name: dict[str, str] = {}
        self._open: frozenset[str] = frozenset()
        self._refused: dict[str, JobError] = {}
        self._infos: dict[str, ModelInfo] = {}  # as of the last load
        for model in models:
            self.add(model)

    def register(self, name: str, further: Iterable[str]) -> None:
        """Have queues for a model that is not in memory. `further`: its other names."""
        self._set({**self._further, name: tuple(further)})

    def add(self, model: ModelInfo, aliases: Iterable[str] = ()) -> None:
        """Serve a model that the backend has loaded. `aliases`: further names."""
        further = (model.reference, *aliases)
        self.register(model.name, further)
        self.provenance |= dict.fromkeys((*further, model.name), asdict(model))
        self._infos = {**self._infos, model.name: model}
        self.open(model.name)

    def remove(self, name: str) -> None:
        """Have no more queues for the model of this name."""
        self.close(name)
        self._set({one: names for one, names in self._further.items() if one != name})

    def open(self, name: str) -> None:
        """Claim jobs for a model that is in memory."""
        self.accept(name)
        self._open |= {name}

    def close(self, name: str) -> None:
        """Claim no more jobs for a model."""
        self._open -= {name}

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
        return self._by_name.get(name) in self._open

    @property
    def about(self) -> dict[str, dict[str, Any]]:
        """All names of each model that was loaded, and the bytes of its weights, by own names."""
        return {
            name: {
                "names": sorted({name, *self._further[name]}),
                "weight_bytes": info.weight_bytes,
            }
            for name, info in self._infos.items()
            if name in self._further
        }

    @property
    def versions(self) -> dict[str, ModelVersion]:
        """The version of each model as of its last load, by each name that has queues."""
        known = {name: self.provenance[name] for name in self if name in self.provenance}
        return {name: ModelVersion.of(provenance_columns(one)) for name, one in known.items()}

    @property
    def open_models(self) -> list[ModelInfo]:
        """The models whose jobs are claimed to run, as of their last load."""
        return [info for name, info in self._infos.items() if name in self._open]

    @property
    def open_names(self) -> dict[str, str]:
        """The own name of each model whose jobs are claimed to run, by each name of it."""
        return {name: own for name, own in self._by_name.items() if own in self._open}

    @property
    def refused_names(self) -> dict[str, str]:
        """The own name of each model whose jobs are claimed to fail, by each name."""
        return {name: own for name, own in self._by_name.items() if own in self._refused}

    def _set(self, further: dict[str, tuple[str, ...]]) -> None:
        self._further = further
        by_others = {other: name for name, others in further.items() for other in others}
        self._by_name = by_others | {name: name for name in further}

    def __getitem__(self, name: str) -> str:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)
