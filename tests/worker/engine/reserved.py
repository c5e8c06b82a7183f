"""Loads models under a budget as a worker does: with memory that was reserved before."""

from __future__ import annotations

from worker.backend import Footprint, ModelInfo, Reservation
from worker.host.engine_host import EngineHost
from worker.model_spec import ModelSpec


def load_reserved(
    host: EngineHost, spec: ModelSpec, part: int = 0, found: Footprint | None = None
) -> ModelInfo:
    """`part`: bytes of the caches' memory that are the model's in a fair division. `found`: before
    a load has measured the activations."""
    found = found or host.footprint(spec)
    fixed = found.weights + found.activations
    given = spec.cache_bytes
    least = found.least_cache if given is None else given
    host.reserve(spec, Reservation(fixed, least, max(part, least), given))
    return host.load(spec)
