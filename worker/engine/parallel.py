"""Loads a model on several ranks: its part in this process, the others in followers."""

from __future__ import annotations

from worker.device import Device
from worker.layers.shard import Shard
from worker.loading.load import LoadedModel, load
from worker.loading.preflight import Preflight
from worker.model_spec import ModelSpec
from worker.ranks.leader import Ranks
from worker.ranks.messages import Part


def load_on_ranks(spec: ModelSpec, device: Device) -> tuple[LoadedModel, Ranks]:
    """The part of the first rank, and its followers, which are not connected yet. Processes start
    when everything is checked that can be checked without them. Raises JobError."""
    started: list[Ranks] = []

    def split(checked: Preflight) -> Shard:
        part = Part(checked.model.source.path, checked.tied, checked.dtype)
        cores = [one.cores for one in spec.rank_devices if one.cores is not None]
        started.append(Ranks(part, device.ranks, cores))
        return started[0].shard

    try:
        loaded = load(spec, device, split=split)
    except BaseException:
        for ranks in started:
            ranks.close()
        raise
    return loaded, started[0]
