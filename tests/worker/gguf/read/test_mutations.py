"""A damaged file is refused by a JobError, or described; nothing else escapes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from jobs import JobError
from tests.worker.checkpoints import make_checkpoint
from tests.worker.gguf.converter import convert
from worker.device import Device
from worker.gguf.read.files import read_local_header
from worker.loading.description import ModelDescription
from worker.loading.find import find
from worker.loading.preflight import preflight
from worker.model_spec import ModelSpec


def describe(path: Path) -> None:
    """Everything that is read before the weights."""
    source = find(str(path))
    source.tokenizer.encode("the dog")
    assert source.special_tokens is not None and source.chat_templates is not None
    model = ModelDescription(source, source.config, source.tokenizer, None, source.defaults)
    with source.weights() as weights:
        spec = ModelSpec(reference=str(path), dtype="fp32")
        preflight(model, spec, Device(torch.device("cpu")), weights)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "qwen3_5_moe_text"])
def test_a_damaged_file_is_refused_by_a_joberror_or_described(family: str, tmp_path: Path) -> None:
    original = convert(make_checkpoint(tmp_path / "m", family), tmp_path / "m.gguf")
    content = original.read_bytes()
    end = min(tensor.begin for tensor in read_local_header(original).tensors.values())
    numbers = content.index(b"tokenizer.ggml.tokens")  # hyperparameters come first
    source, refused = random.Random(3), 0
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(source.randint(1, 2)):
            at = source.randrange(24, numbers if source.random() < 0.7 else end)
            damaged[at] = source.choice((0, 1, 2, 128, 255, source.randrange(256)))
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        try:
            describe(path)
        except JobError as error:
            assert error.code in ("unsupported_model", "out_of_memory")
            assert "\n" not in error.message
            refused += 1
    assert 15 < refused < 60
