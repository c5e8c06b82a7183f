"""Which models are on the device: those that the worker was told to serve, for its whole life."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jobs.errors import invalid
from worker.backend import Backend, ModelInfo

logger = logging.getLogger(__name__)


def load_all(backend: Backend, references: Sequence[str]) -> list[ModelInfo]:
    """Load the models in order. Raises JobError for the first that can't be loaded, and for two
    that would share a name, since the name is the queue."""
    twice = next((one for one in references if references.count(one) > 1), None)
    if twice is not None:
        raise invalid(f"model '{twice}' is given twice: once is enough", "model")
    loaded: list[ModelInfo] = []
    for reference in references:
        info = backend.load(reference)
        if info.name in (other.name for other in loaded):
            raise invalid(
                f"two models are called '{info.name}': they would share a queue; rename one folder",
                "model",
            )
        logger.info(
            "loaded %s: %s, %.1f M parameters, %s on %s (%s), context %d",
            info.name,
            info.family,
            info.parameters / 1e6,
            info.dtype,
            info.device,
            info.device_name,
            info.context_length,
        )
        loaded.append(info)
    return loaded
