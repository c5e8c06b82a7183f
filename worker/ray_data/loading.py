"""Loads the model of an actor. Imports torch when it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jobs.errors import JobError, invalid
from worker import advice
from worker.backend import Backend, ModelInfo
from worker.model_spec import ModelSpec
from worker.ray_data.arguments import PredictorArguments

# Fields of ModelSpec that `Engine.load` does not take.
NOT_GIVEN = ("reference", "aliases", "prompt_caches")
ENGINE_OPTIONS = (
    "device",
    *(one.name for one in fields(ModelSpec) if one.name not in NOT_GIVEN),
)


def check_engine_kwargs(given: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a name that `Engine.load` does not know."""
    for name in given:
        if name not in ENGINE_OPTIONS:
            close = get_close_matches(str(name), ENGINE_OPTIONS, 1)
            hint = f"did you mean {close[0]!r}?" if close else ", ".join(ENGINE_OPTIONS)
            raise invalid(f"engine_kwargs: unknown argument {name!r}; {hint}", "engine_kwargs")


def load(arguments: PredictorArguments) -> tuple[Backend, ModelInfo]:
    """A backend that has loaded a model. Raises JobError."""
    engine_kwargs = arguments.engine_kwargs or {}
    check_engine_kwargs(engine_kwargs)
    try:
        from worker.host.engine_host import EngineHost
        from worker.prompt.template import template_path
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise JobError("unavailable", f"an actor generates and needs torch: {advice()}") from None

    options = {name: value for name, value in engine_kwargs.items() if name != "device"}
    for name, path in (("chat_template", template_path), ("download_dir", Path)):
        if options.get(name) is not None:
            options[name] = path(options[name])
    spec = ModelSpec(reference=arguments.model, **options)
    spec.require_types()
    if not arguments.download:
        _require_here(spec)
    backend = EngineHost(device=engine_kwargs.get("device", "auto"), interactive_slots=0)
    try:
        return backend, backend.load(spec)
    except BaseException:
        backend.close()
        raise


def _require_here(spec: ModelSpec) -> None:
    """Raise JobError if weights would have to be downloaded."""
    from worker.loading.find import find

    for one in (spec, spec.draft_spec):
        if one is not None and find(one.reference, one.download_dir).needs_download:
            raise JobError(
                "model_not_found",
                f"{one.reference} is not on this node: run chatjobs models pull {one.reference} on "
                "each node, or give download=True",
            )
