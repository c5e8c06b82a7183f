"""Typed access to a file's metadata. Errors name the key that is missing or invalid."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.models.config_fields import REQUIRED, Fields

ARCHITECTURE = "general.architecture"


class Metadata(Fields):
    """The metadata of a model. Hyperparameters have keys that begin with its architecture's name;
    all methods raise JobError("unsupported_model")."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        super().__init__(values, str(path))
        self.path = path
        self.architecture = self.text(ARCHITECTURE)

    def key(self, name: str) -> str:
        """The key of a hyperparameter."""
        return f"{self.architecture}.{name}"

    def size(
        self, name: str, default: Any = REQUIRED, *, minimum: int = 1, maximum: int | None = None
    ) -> int:
        """A whole-number hyperparameter. An array with a value per layer must repeat one value."""
        key = self.key(name)
        value = self.values.get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.error(f"{key} differs between layers, which is not supported")
            repeated = Fields({key: value[0]}, self.where)
            return repeated.integer(key, default, minimum=minimum, maximum=maximum)
        return self.integer(key, default, minimum=minimum, maximum=maximum)

    def scale(self, name: str, default: Any = REQUIRED, *, or_zero: bool = True) -> float:
        """A hyperparameter that is a number of at least 0."""
        return self.number(self.key(name), default, or_zero=or_zero)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        return self.boolean(self.key(name), default)

    def flags(self, name: str, count: int) -> list[bool] | None:
        """A hyperparameter with a truth value for each of `count` layers; None if it is absent or
        a single number."""
        value = self.values.get(self.key(name))
        if not isinstance(value, list):
            return None
        if len(value) < count or not all(isinstance(item, bool | int) for item in value):
            raise self.error(f"{self.key(name)} must hold a truth value for each of {count} layers")
        return [bool(item) for item in value[:count]]
