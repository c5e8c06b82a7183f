"""The memory that a model will take, from the headers of its files: no weight is read."""

from __future__ import annotations

from worker.backend import Footprint
from worker.cache.sizes import CacheSizes
from worker.device import Device, limits
from worker.engine.activations import activations_of
from worker.engine.slots import Slots
from worker.loading.description import describe
from worker.loading.find import find
from worker.loading.preflight import Preflight, preflight
from worker.model_spec import ModelSpec


def footprint(
    spec: ModelSpec, device: Device, interactive_slots: int | None = 0, *, preempt: bool = False
) -> Footprint:
    """Find a model and read its headers; of a hub model, only small files are fetched.
    `interactive_slots`, `preempt`: see `Slots`. Raises JobError."""
    found = _look(spec, device)
    draft = None if spec.draft_spec is None else _look(spec.draft_spec, device)
    place = limits(device.torch)
    batch = place.max_batch if spec.max_batch is None else spec.max_batch
    slots = Slots.share(batch, interactive_slots, preempt)
    sizes = CacheSizes(found.caches, draft.caches if draft else ())
    context, activations = spec.context or found.context_length, activations_of(found, spec)
    return Footprint(
        name=found.model.source.name,
        reference=spec.reference,
        weights=found.weight_bytes + (draft.weight_bytes if draft else 0),
        activations=activations.nbytes,
        activations_measured=activations.measured,
        least_cache=sizes.least(context),
        most_cache=(slots.batch + slots.paused + 1) * sizes.sequence(context),
    )


def _look(spec: ModelSpec, device: Device) -> Preflight:
    source = find(spec.reference, spec.download_dir)
    return preflight(describe(source, spec.chat_template), spec, device, source.headers())
