"""Random blocks of each quantised type, with scales that make weights of a usual size; and a small
model whose matrices are such blocks."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUFReader, quants
from gguf import GGMLQuantizationType as Type

from tests.worker.checkpoints import make_checkpoint
from tests.worker.gguf.converter import convert

STD = 0.06
# Per type: the byte offset of the scale (half precision) in a block, and, if there is one, that of
# the minimum with its ratio to the scale, so that values are centred.
SCALES: dict[Type, tuple[int, tuple[int, float] | None]] = {
    Type.Q4_0: (0, None),
    Type.Q4_1: (0, (2, -7.5)),
    Type.Q5_0: (0, None),
    Type.Q5_1: (0, (2, -15.5)),
    Type.Q8_0: (0, None),
    Type.Q2_K: (80, (82, 1.5)),
    Type.Q3_K: (108, None),
    Type.Q4_K: (0, (2, 7.5)),
    Type.Q5_K: (0, (2, 15.5)),
    Type.Q6_K: (208, None),
    Type.IQ1_S: (0, None),
    Type.IQ2_XXS: (0, None),
    Type.IQ2_XS: (0, None),
    Type.IQ2_S: (0, None),
    Type.IQ3_XXS: (0, None),
    Type.IQ3_S: (0, None),
    Type.IQ4_NL: (0, None),
    Type.IQ4_XS: (0, None),
    Type.TQ1_0: (52, None),
    Type.TQ2_0: (64, None),
}
TYPES = (*SCALES, Type.IQ1_M, Type.MXFP4, Type.NVFP4)
Encode = Callable[[Any, Type], Any]


def random_blocks(count: int, kind: Type, seed: int) -> Any:
    """uint8 [count, bytes of a block]; the values have a standard deviation of about STD."""
    random = np.random.default_rng(seed)
    _, size = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (count, size), np.uint8)
    if kind is Type.MXFP4:
        blocks[:, 0] = random.integers(120, 123, count)
        return blocks
    if kind is Type.NVFP4:
        blocks[:, :4] = random.integers(20, 30, (count, 4))
        return blocks
    factors = random.uniform(0.7, 1.4, count)
    _set_scale(blocks, kind, np.ones(count))
    unscaled = float(np.std(quants.dequantize(blocks[:256], kind)))
    _set_scale(blocks, kind, factors * STD / unscaled)
    return blocks


def _set_scale(blocks: Any, kind: Type, scales: Any) -> None:
    halves = scales.astype(np.float16)
    if kind is Type.IQ1_M:  # four bits of the scale in each of the last four words
        words = blocks[:, 48:].view(np.uint16)
        bits = halves.view(np.uint16)
        for index in range(4):
            nibble = (bits >> (4 * index)) & 15
            words[:, index] = (words[:, index] & 0x0FFF) | (nibble << 12)
        return
    at, minimum = SCALES[kind]
    blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if minimum is not None:
        at, ratio = minimum
        low = (halves.astype(np.float32) * ratio).astype(np.float16)
        blocks[:, at : at + 2] = low.view(np.uint8).reshape(-1, 2)


def encode(values: Any, kind: Type) -> Any:
    """Random blocks in place of the values of a matrix, the same ones each time."""
    columns, _ = GGML_QUANT_SIZES[kind]
    seed = zlib.crc32(values.tobytes())
    blocks = random_blocks(values.size // columns, kind, seed)
    return blocks.reshape(*values.shape[:-1], -1)


def make_wide(folder: Path) -> Path:
    """A checkpoint whose rows consist of whole blocks of every type."""
    fields: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    return make_checkpoint(folder, "llama", num_hidden_layers=2, **fields)


def make_type_file(checkpoint: Path, out: Path, kind: Type) -> Path:
    """The model with random blocks of `kind` in place of its matrices."""
    return convert(checkpoint, out, kind, encode=encode)


def dequantised(file: Path, checkpoint: Path, out: Path) -> Path:
    """The same model in float32, with the values that `gguf` computes."""
    tensors = {
        tensor.name: torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in GGUFReader(file).tensors
    }
    return convert(checkpoint, out, Type.F32, tensors=tensors)
