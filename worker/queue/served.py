"""The models that a worker serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from worker.backend import ModelInfo


class Served(Mapping[str, ModelInfo]):
    """Owns the set of models, by each name that has queues: the model's own name, the reference
    that it was loaded by, and its aliases. Whoever needs the models asks it each time, and keeps no
    copy.

    The loop's thread changes the set; any thread may read it.
    """

    def __init__(self, models: Iterable[ModelInfo] = ()) -> None:
        # The rows of jobs that still run when their model is removed need its provenance.
        self.provenance: dict[str, dict[str, Any]] = {}
        self._models: dict[str, tuple[ModelInfo, tuple[str, ...]]] = {}  # with further names
        self._by_name: dict[str, ModelInfo] = {}  # replaced, never changed
        for model in models:
            self.add(model)

    def add(self, model: ModelInfo, aliases: Iterable[str] = ()) -> None:
        """Serve a model that the backend has loaded. `aliases`: further names."""
        others = (model.reference, *aliases)
        self._set({**self._models, model.name: (model, others)})
        self.provenance |= dict.fromkeys((*others, model.name), asdict(model))

    def remove(self, name: str) -> None:
        """Claim no more jobs for the model of this name."""
        self._set({one: kept for one, kept in self._models.items() if one != name})

    @property
    def model_names(self) -> dict[str, str]:
        """The own name of each model, by each name that has queues."""
        return {name: model.name for name, model in self._by_name.items()}

    def _set(self, models: dict[str, tuple[ModelInfo, tuple[str, ...]]]) -> None:
        self._models = models
        by_others = {name: model for model, others in models.values() for name in others}
        self._by_name = by_others | {name: model for name, (model, _) in models.items()}

    def __getitem__(self, name: str) -> ModelInfo:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)
