"""The devices of several ranks, and the options that can't be used together with them."""

from __future__ import annotations

import sys

import torch.distributed

from jobs.errors import JobError, invalid
from worker.device import Device
from worker.kernels import library
from worker.kernels.compilers import CannotBuild
from worker.model_spec import ModelSpec

MOST_RANKS = 64


def place_ranks(spec: ModelSpec, device: Device) -> None:
    """Give each rank its device, and refuse what several ranks do not do, before a file of the
    model is read. Raises JobError (invalid_request)."""
    ranks = spec.tensor_parallel
    if type(ranks) is not int or not 1 <= ranks <= MOST_RANKS:
        raise _refused(f"tensor_parallel must be 1 to {MOST_RANKS}, got {ranks!r}")
    if ranks == 1:
        return
    named = f"tensor_parallel {ranks}"
    if not sys.platform.startswith("linux"):
        raise _refused(f"{named} needs Linux, which ends the processes of ranks with their worker")
    for option, given in (
        ("draft other than 'ngram'", spec.draft_spec is not None),
        ("quantize", spec.quantize is not None),
        ("prompt_caches", bool(spec.prompt_caches)),
        ("memory", device.budget is not None),
    ):
        if given:
            raise _refused(f"{named} can't be used with {option}: leave one of them out")
    device.spread(spec)
    if device.torch.type != "cpu":
        if not torch.distributed.is_nccl_available():
            raise _refused(
                f"{named} on GPUs needs NCCL, by which ranks exchange what they compute, and this "
                "build of torch has none: install one for CUDA, or give each GPU a worker"
            )
        return
    try:
        library.load()
    except CannotBuild as error:
        raise _refused(
            f"{named} needs the CPU kernels, by which ranks exchange what they compute, and can't "
            f"have them here: {error}"
        ) from None


def _refused(message: str) -> JobError:
    return invalid(message, "tensor_parallel")
