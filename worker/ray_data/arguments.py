"""The arguments of an actor, which the driver checks and passes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from jobs.data_sets.modes import MODES


@dataclass(frozen=True)
class PredictorArguments:
    """Those of `EnginePredictor`, which describes them. `vars` gives them by their names."""

    model: str
    _: KW_ONLY
    mode: str = MODES[0]
    options: Mapping[str, Any] | None = None
    columns: Mapping[str, str] | None = None
    template: str | None = None
    delimiter: str | None = None
    seed: int | None = None
    run: str = "ray"
    engine_kwargs: Mapping[str, Any] | None = None
    download: bool = False
