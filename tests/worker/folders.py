"""Helpers that damage a model folder, and the errors that follow."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs import JobError
from worker.device import Device
from worker.loading.load import LoadedModel, load
from worker.model_spec import ModelSpec

WEIGHTS = "model.safetensors"


def loaded(folder: Path | str) -> LoadedModel:
    return load(ModelSpec(reference=str(folder), dtype="fp32"), Device(torch.device("cpu")))


def refusal(folder: Path | str, code: str = "unsupported_model") -> str:
    """The error message for loading the folder; checks its code and that it is a single line."""
    with pytest.raises(JobError) as caught:
        loaded(folder)
    assert caught.value.code == code
    assert "\n" not in caught.value.message
    return caught.value.message


def logits(folder: Path) -> torch.Tensor:
    from worker import Engine

    return Engine.load(str(folder), device="cpu", dtype="fp32").prompt_logits([5, 6, 7])


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(file.read_text(encoding="utf-8"))
    change(values)
    file.write_text(json.dumps(values), encoding="utf-8")


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def set_header(folder: Path, header: object, body: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw + body)
