"""Quantises a model: from a folder of safetensors files to one GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from torch import Tensor

from jobs.disk import part_of
from jobs.errors import JobError
from worker.checkpoint import weights
from worker.checkpoint.quantization import Mxfp4
from worker.checkpoint.source import ModelSource
from worker.gguf.read.source import GgufSource
from worker.gguf.tensor_format import DENSE
from worker.gguf.write.description import describe
from worker.gguf.write.recipe import KINDS, file_type, types
from worker.gguf.write.tensors import OutputTensor, output_tensors
from worker.gguf.write.tokenizer import vocabulary
from worker.layers.weights.quantise import quantise
from worker.models.model import Placement
from worker.models.registry import FAMILIES

QUANTISATION_VERSION = 2  # of the block layouts
Progress = Callable[[int, int], None]  # values that are written, and all values


@dataclass(frozen=True)
class QuantisedFile:
    """The file that was written."""

    path: Path
    kind: str
    parameters: int
    bytes: int


def quantise_model(
    source: ModelSource, kind: str, output: Path, progress: Progress, *, replace: bool = False
) -> QuantisedFile:
    """Write `source` as the GGUF file `output` of a `kind` of `mix.KINDS`. The file appears when it
    is complete. Raises JobError."""
    if output.exists() and not replace:
        raise JobError("invalid_request", f"{output} exists already; give another name, or --force")
    if not output.parent.is_dir():
        raise JobError("invalid_request", f"there is no folder {output.parent}; create it first")
    config = source.config
    if isinstance(source, GgufSource):
        raise JobError(
            "unsupported_model",
            f"{source.path} is a GGUF file already; give the original model with safetensors files",
        )
    description = describe(config)
    source.download_weights()
    with source.weights() as checkpoint:
        tied = weights.is_tied(config.tied, checkpoint, config.quantization)
        place = Placement(torch.float32, torch.device("meta"))
        model = FAMILIES[config.model_type](config.fields, tied, place)
        slots = model.weight_map()
        found = weights.check(slots, checkpoint, config.quantization)

        def read(name: str) -> Tensor:
            weight = found[name].read(checkpoint)
            assert isinstance(weight, Tensor)
            return weight

        def is_mxfp4(one: OutputTensor) -> bool:
            stored = [found[name].quantization for name in one.sources]
            return bool(stored) and all(isinstance(each, Mxfp4) for each in stored)

        outputs = output_tensors(
            description,
            config.fields.layers(),
            {name: slot.shape for name, slot in slots.items()},
            read,
        )
        metadata = {
            f"{description.architecture.name}.{key}": value
            for key, value in description.keys.items()
        }
        metadata |= vocabulary(source, model.vocab_size)
        metadata["general.name"] = source.name
        metadata["general.file_type"] = int(file_type(kind))
        metadata["general.quantization_version"] = QUANTISATION_VERSION
        chosen = types(kind, {one.name: one.shape for one in outputs}, description.experts)
        if KINDS[kind] not in DENSE:
            chosen |= {one.name: GGMLQuantizationType.MXFP4 for one in outputs if is_mxfp4(one)}
        partial = part_of(output)
        try:
            _write(partial, description.architecture.name, metadata, outputs, chosen, progress)
            os.replace(partial, output)
        except OSError as error:
            raise JobError(
                "internal", f"{output} cannot be written: {error.strerror or error}"
            ) from None
        finally:
            with suppress(FileNotFoundError):
                partial.unlink()
    parameters = sum(prod(one.shape) for one in outputs)
    return QuantisedFile(output, kind, parameters, output.stat().st_size)


def _write(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    outputs: list[OutputTensor],
    chosen: dict[str, GGMLQuantizationType],
    progress: Progress,
) -> None:
    writer = GGUFWriter(path, architecture)
    try:
        writer.add_type("model")
        for key, value in metadata.items():
            _add(writer, key, value)
        for one in outputs:
            shape = _byte_shape(one.shape, chosen[one.name])
            writer.add_tensor_info(
                one.name, shape, np.dtype(np.uint8), prod(shape), chosen[one.name]
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        total, written = sum(prod(one.shape) for one in outputs), 0
        for one in outputs:
            values = one.read()
            if not values.isfinite().all():
                raise JobError(
                    "unsupported_model",
                    f"the values of {one.name} are not all finite; download the model again",
                )
            writer.write_tensor_data(_encoded(values, chosen[one.name]))
            written += prod(one.shape)
            progress(written, total)
        for file in writer.fout or ():
            file.flush()
            os.fsync(file.fileno())
    finally:
        writer.close()


def _encoded(values: Tensor, kind: GGMLQuantizationType) -> Any:
    """The bytes of a tensor, uint8 [..., bytes per row]."""
    if kind in DENSE:
        return values.to(DENSE[kind]).contiguous().view(torch.uint8).numpy()
    return quantise(values, kind).blocks.numpy()


def _byte_shape(shape: tuple[int, ...], kind: GGMLQuantizationType) -> tuple[int, ...]:
    values, size = GGML_QUANT_SIZES[kind]
    return (*shape[:-1], shape[-1] // values * size)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
