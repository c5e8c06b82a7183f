"""Facts about a model that was checked without its weights, for the commands that print them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.loading.preflight import Preflight
    from worker.model_spec import ModelSpec


def obstacle_of(found: Preflight) -> str | None:
    """The reason for which a worker can't answer chat requests with the model; None if it can."""
    from worker.prompt.template import chat_obstacle

    lacks = chat_obstacle(found.model.template)
    return found.obstacle or (lacks and f"{found.model.source.reference} {lacks}")


def facts_of(found: Preflight, spec: ModelSpec, downloaded: bool) -> dict[str, Any]:
    """The object of `chatjobs models check --json`."""
    from worker.engine.activations import activations_of

    activations = activations_of(found, spec)
    source, quantization = found.model.source, found.model.config.quantization
    return {
        "model": source.name,
        "revision": source.revision,
        "folder": str(source.path),
        "downloaded": downloaded,
        "family": found.model.config.model_type,
        "parameters": found.parameters,
        "dtype": found.dtype_name,
        "weight_bytes": found.weight_bytes,
        "activation_bytes": activations.nbytes,
        "activations_measured": activations.measured,
        "quantised_types": list(found.blocks),
        "products": [
            {
                "type": one.kind,
                "matrices": one.matrices,
                "way": one.product.value,
                "extra_bytes": one.extra_bytes,
            }
            for one in found.products
        ],
        "dequantised_from": quantization.name.lower() if quantization else None,
        "context_length": found.context_length,
        "longest_sequence": found.longest,
        "chat_template": found.model.template is not None,
        "tensor_parallel": spec.tensor_parallel,
        "device": str(found.device),
        "cpu_kernels": kernels() if found.device.type == "cpu" else None,
        "free_bytes": found.free_bytes,
        "fits": found.obstacle is None,
        "obstacle": obstacle_of(found),
    }


def kernels() -> str:
    """The kernels for the CPU, in words."""
    from worker.kernels import library

    return library.description()
