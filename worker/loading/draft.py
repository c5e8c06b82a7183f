"""Loads the draft of a model after checking that it can draft for it."""

from __future__ import annotations

from jobs.errors import JobError, invalid
from worker.checkpoint.tokenizer import Tokenizer
from worker.device import Device
from worker.loading.description import describe
from worker.loading.find import find
from worker.loading.load import HostModels, LoadedModel, load
from worker.loading.preflight import Preflight, preflight
from worker.model_spec import ModelSpec


def load_draft(
    spec: ModelSpec, target: ModelSpec, device: Device, host: HostModels | None
) -> LoadedModel:
    """Compare two models by their headers, and load the draft. Call it before the target is
    loaded. Raises JobError("invalid_request") if one can't draft for the other, and the errors of
    `load`."""
    small, large = _look(spec, device), _look(target, device)
    _check(spec.reference, small, target.reference, large)
    return load(spec, device, host)


def _look(spec: ModelSpec, device: Device) -> Preflight:
    source = find(spec.reference, spec.download_dir)
    return preflight(describe(source), spec, device, source.headers())


def _check(draft: str, small: Preflight, reference: str, large: Preflight) -> None:
    """Refuse a draft that is larger, or that numbers its tokens in another way."""
    if small.parameters > large.parameters:
        raise invalid(
            f"draft '{draft}' has {small.parameters / 1e6:.1f} M parameters and the model "
            f"'{reference}' {large.parameters / 1e6:.1f} M: use a draft that is smaller than the "
            "model",
            "draft",
        )
    different = _difference(small.tokenizer, large.tokenizer)
    if different is not None:
        raise invalid(
            f"draft '{draft}' has another vocabulary than the model '{reference}' ({different}): "
            "use a draft of the same model family, or 'ngram'",
            "draft",
        )
    needed = small.weight_bytes + large.weight_bytes
    if needed > large.free_bytes:
        raise JobError(
            "out_of_memory",
            f"'{reference}' and its draft '{draft}' need {needed / 2**30:.1f} GiB for their "
            f"weights and {large.device} has {large.free_bytes / 2**30:.1f} GiB free: use a "
            "smaller draft, or 'ngram'",
        )


def _difference(small: Tokenizer, large: Tokenizer) -> str | None:
    """The first id that is another token for the draft. Ids that only one of them has are padding
    or can't be drafted."""
    ids = range(min(small.vocab_size, large.vocab_size))
    for token_id in ids:
        mine, theirs = small.piece(token_id), large.piece(token_id)
        if mine != theirs:
            return f"id {token_id} is {mine!r} in the draft and {theirs!r} in the model"
        if small.is_special(token_id) != large.is_special(token_id):
            only = "draft" if small.is_special(token_id) else "model"
            return f"id {token_id}, {mine!r}, is a special token of the {only} only"
    return None
