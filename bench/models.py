"""Models of a given shape as each contestant reads them, and the peers that run beside chatjobs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from bench.peers.process import PeerProcess, export_openvino
from bench.shapes import QWEN3_06B, QWEN3_MOE, random_checkpoint

# Format → the kind of GGUF file, and the weights of OpenVINO's model (fp16 runs in bf16).
FORMATS = {"bf16": ("BF16", "fp16"), "Q8_0": ("Q8_0", "int8"), "Q4_K_M": ("Q4_K_M", "int4")}
SHAPES = {  # family, fields, title
    "dense": ("qwen3", QWEN3_06B, "Qwen3-0.6B shape"),
    "mixture": ("qwen3_moe", QWEN3_MOE, "Qwen3-MoE shape, 128 experts"),
}


@dataclass(frozen=True)
class Model:
    """A checkpoint in one format. Files are made beside it when they are first needed, and used
    again."""

    checkpoint: Path
    format: str

    @property
    def ours(self) -> Path:
        return self.checkpoint if self.format == "bf16" else self.gguf

    @cached_property
    def gguf(self) -> Path:
        kind, _ = FORMATS[self.format]
        return quantise(self.checkpoint, kind, self.checkpoint.with_name(f"{kind}.gguf"))

    @cached_property
    def openvino(self) -> Path:
        _, weights = FORMATS[self.format]
        return export_openvino(self.checkpoint, weights, self.checkpoint.with_name(weights))


class Peer(NamedTuple):
    """A module of bench.peers, and what it reads of a model."""

    module: str
    reads: Callable[[Model], Path]
    formats: Sequence[str] = tuple(FORMATS)


PEERS = {
    "llama.cpp": Peer("llama_cpp_peer", lambda model: model.gguf),
    "llama.cpp server": Peer("llama_server_peer", lambda model: model.gguf),
    "ik_llama.cpp": Peer("ik_llama_peer", lambda model: model.gguf),
    "mistral.rs": Peer("mistral_rs_peer", lambda model: model.gguf, ("Q4_K_M",)),
    "OpenVINO": Peer("openvino_peer", lambda model: model.openvino),
    "vLLM": Peer("vllm_peer", lambda model: model.checkpoint, ("bf16",)),
}
OURS = Peer("chatjobs_peer", lambda model: model.ours)  # where each contestant runs alone


def checkpoint(folder: Path, shape: str) -> Path:
    """Random weights of a shape in `folder`, or an earlier checkpoint."""
    family, fields, _ = SHAPES[shape]
    path = folder / shape / "checkpoint"
    return path if path.exists() else random_checkpoint(path, family, fields)


def peers_of(
    model: Model, names: Sequence[str], limit: float | None = None
) -> dict[str, PeerProcess]:
    """The peers of these names that run the model's format. They start when they are asked."""
    return {
        name: process(PEERS[name], model, limit)
        for name in names
        if model.format in PEERS[name].formats
    }


def process(peer: Peer, model: Model, limit: float | None = None) -> PeerProcess:
    return PeerProcess(peer.module, peer.reads(model), torch.get_num_threads(), limit)


def quantise(source: Path, kind: str, target: Path) -> Path:
    """A GGUF file made by `chatjobs models quantize`, or an earlier one."""
    if target.exists():
        return target
    chatjobs = str(Path(sys.executable).with_name("chatjobs"))
    command = [chatjobs, "models", "quantize", str(source), "--type", kind, "-o", str(target)]
    subprocess.run(command, check=True)
    return target
