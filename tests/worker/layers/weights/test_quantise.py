"""Quantisation to blocks: the error beside llama.cpp's own quantiser, and special values."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from tests.worker.layers.weights.record_llama_cpp import RECORDED, TYPES, rms_error, samples
from worker.layers.weights.quantise import FUNCTIONS, quantise

SIMPLE = [name for name in TYPES if not name.endswith("_K")]
ERRORS = json.loads(RECORDED.read_text())["errors"]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("sample", samples())
def test_the_error_is_that_of_llama_cpp(name: str, sample: str) -> None:
    """Within 2 %; llama.cpp's errors are recorded."""
    kind, values = GGMLQuantizationType[name], samples()[sample]
    blocks = quantise(torch.from_numpy(values), kind).blocks.numpy()
    assert rms_error(values, blocks, kind) < 1.02 * ERRORS[name][sample]


@pytest.mark.parametrize("name", SIMPLE)
def test_simple_types_are_written_bit_for_bit_as_ggml_writes_them(name: str) -> None:
    kind = GGMLQuantizationType[name]
    values = np.concatenate(list(samples().values()))
    values[3, :64] = 0
    values[4, :32] = np.arange(32) / 254 - 16 / 254  # halves between two numbers of Q8_0
    expected = quants.quantize(values, kind)
    assert (quantise(torch.from_numpy(values), kind).blocks.numpy() == expected).all()


def test_mxfp4_is_written_as_gguf_writes_it_and_keeps_its_own_numbers() -> None:
    kind = GGMLQuantizationType.MXFP4
    values = np.concatenate(list(samples().values()))
    values[3, :64] = 0
    values[4, :32] = np.arange(32) / 16 - 1  # halves between two numbers
    written = quantise(torch.from_numpy(values), kind)
    assert (written.blocks.numpy() == quants.quantize(values, kind)).all()
    numbers = written.dequantise(torch.float32)
    again = quantise(numbers, kind)
    assert torch.equal(again.dequantise(torch.float32), numbers)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("value", [0.0, 1e-30, 0.5, -0.5])
def test_constant_values_are_kept(name: str, value: float) -> None:
    tensor = torch.full((2, 256), value)
    found = quantise(tensor, GGMLQuantizationType[name]).dequantise(torch.float32)
    torch.testing.assert_close(found, tensor, rtol=0.02, atol=1e-6)


def test_shapes_and_dtypes_of_the_values_are_free() -> None:
    values = torch.randn(3, 5, 64).bfloat16()
    found = quantise(values, GGMLQuantizationType.Q8_0)
    assert found.shape == (3, 5, 64)
    assert found.blocks.shape == (3, 5, 68)
    torch.testing.assert_close(found.dequantise(torch.bfloat16), values, rtol=0.02, atol=0.02)


DIGEST = """
import hashlib, torch
from gguf import GGMLQuantizationType as Type
from worker.layers.weights.quantise import FUNCTIONS, quantise
numbers = torch.randint(-(2**20), 2**20, (256, 1024), generator=torch.Generator().manual_seed(0))
values = (numbers.double() ** 3 / 2**60).float()
for kind in FUNCTIONS:
    blocks = quantise(values, kind).blocks.numpy()
    print(kind.name, hashlib.sha256(blocks).hexdigest())
"""


def test_blocks_are_the_same_on_every_cpu() -> None:
    """The functions of torch and MKL have code for several CPUs, which need not agree."""
    outputs = []
    for other in ({}, {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}):
        command = [sys.executable, "-c", DIGEST]
        outputs.append(subprocess.check_output(command, env=os.environ | other, text=True))
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == len(FUNCTIONS)
