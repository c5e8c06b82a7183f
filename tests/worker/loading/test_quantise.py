"""Quantised weights of a loaded model: from GGUF files, and with `quantize` while loading."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from jobs import JobError, Sampling
from tests.worker.checkpoints import make_checkpoint
from worker import Engine
from worker.gguf.write import model
from worker.gguf.write.model import quantise_model
from worker.kernels import library
from worker.layers.weights.quantise import quantise
from worker.layers.weights.quantised_tensor import QuantisedTensor
from worker.loading.find import find

PROMPT = [5, 260, 17, 40, 9, 301]
NORMS = ("input", "post_attention")
FAMILIES = ("qwen3", "qwen3_moe", "gemma3_text")
WIDE = {"query_pre_attn_scalar": 16}  # gemma3's, for its file


def make(path: Path, family: str) -> Path:
    fields = WIDE if family.startswith("gemma") else {}
    return make_checkpoint(path, family, dtype="bfloat16", **fields)


@pytest.mark.parametrize("family", FAMILIES)
def test_q8_at_load_is_a_q8_0_file(family: str, tmp_path: Path) -> None:
    """The same blocks in memory, so the same logits, bit for bit."""
    folder, file = make(tmp_path / "it", family), tmp_path / "it.gguf"
    quantise_model(find(str(folder)), "Q8_0", file, lambda done, total: None)
    at_load = Engine.load(str(folder), device="cpu", quantize="q8")
    plain = Engine.load(str(folder), device="cpu")
    from_file = Engine.load(str(file), device="cpu", dtype="bf16")
    assert at_load.info.dtype == from_file.info.dtype == "bfloat16, Q8_0"
    logits = at_load.prompt_logits(PROMPT)
    assert torch.equal(logits, from_file.prompt_logits(PROMPT))
    assert not torch.equal(logits, plain.prompt_logits(PROMPT))
    # A tied head is packed from the file's pages there, and from blocks in memory here. Routers are
    # counted as if they were quantised, too.
    config = json.loads((folder / "config.json").read_text())
    head = config["vocab_size"] * config["hidden_size"] * 34 // 32 if family == "gemma3_text" else 0
    expected = from_file.info.weight_bytes + head
    assert at_load.info.weight_bytes == pytest.approx(expected, rel=0.01)
    # Norms, routers and padding are not quantised.
    assert at_load.info.weight_bytes - head < 0.65 * plain.info.weight_bytes


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "glm4", "phi3", "olmo2"])
def test_q8_stays_close_to_the_plain_weights(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is wide, because these random models multiply small differences. Kernels round
    activations as finely as the weights, which adds no more than the weights' own error twice."""
    folder = make(tmp_path / "it", family)
    plain = Engine.load(str(folder), device="cpu", dtype="fp32").prompt_logits(PROMPT)

    def load() -> tuple[Engine, float]:
        engine = Engine.load(str(folder), device="cpu", dtype="fp32", quantize="q8")
        difference = (engine.prompt_logits(PROMPT) - plain).norm() / plain.norm()
        return engine, float(difference)

    engine, error = load()
    monkeypatch.setattr(library, "active", lambda: None)
    _, exact = load()
    monkeypatch.undo()
    print(f"{family}: {error:.4f}, with exact activations {exact:.4f}")
    assert 1e-4 < exact < 0.1
    assert 1e-4 < error < 3 * exact
    (answer,) = engine.generate([PROMPT], Sampling(temperature=0, max_tokens=5, ignore_eos=True))
    assert len(answer.token_ids) == 5


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="unknown quantize 'q3'; possible: q8"):
        Engine.load("demo", quantize="q3")


MEASURE = """
import ctypes, sys
from jobs import Sampling
from worker import Engine
from worker.loading.find import find

def pages():
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is not in use
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {name: int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")}

def mapped():
    total, ours = 0, False
    for line in open("/proc/self/smaps"):
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            ours = sys.argv[1] in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total

def run(model):
    engine = Engine.load(model, device="cpu", dtype="bf16", context=64, max_batch=1)
    engine.generate([[5, 6, 7, 8] * 4], Sampling(temperature=0, max_tokens=2, ignore_eos=True))
    return engine

first = run(sys.argv[2])  # a small model: what torch and the kernels take
before = pages()["RssAnon"]
tokenizer = find(sys.argv[1]).tokenizer
tokenizer_bytes = pages()["RssAnon"] - before
second = run(sys.argv[1])
print(pages()["RssAnon"] - before - 2 * tokenizer_bytes + mapped())
"""


@pytest.mark.parametrize(
    ("kind", "layers", "fields"),
    [
        ("Q8_0", 6, {}),
        ("Q4_K_M", 10, {}),
        ("Q4_K_M", 2, {"num_local_experts": 8, "num_experts_per_tok": 2}),
        ("Q8_0", 2, {"vocab_size": 60_000, "tie_word_embeddings": True}),
    ],
    ids=["dense Q8_0", "dense Q4_K_M", "experts", "tied embedding"],
)
def test_a_file_takes_little_more_memory_than_its_size(
    kind: str,
    layers: int,
    fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted: all resident pages of the file's mapping, and the anonymous memory that loading it
    and generating adds to a process that has run another model, without the tokenizer. The cache of
    64 tokens is in it."""
    monkeypatch.setattr(model, "quantise", first_rows_repeated)
    large = large_checkpoint(tmp_path / "large", layers, fields)
    small = make_checkpoint(tmp_path / "small")
    file, tiny = tmp_path / "large.gguf", tmp_path / "small.gguf"
    quantise_model(find(str(large)), kind, file, lambda done, total: None)
    quantise_model(find(str(small)), "Q8_0", tiny, lambda done, total: None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.run_code", MEASURE, "measure", str(file), str(tiny)],
        capture_output=True,
        text=True,
        check=True,
    )
    size = file.stat().st_size
    assert size > 90 * 2**20
    assert 0.8 * size < int(done.stdout) < 1.15 * size


def large_checkpoint(path: Path, layers: int, fields: dict[str, Any]) -> Path:
    """A model of `layers` times 17 million parameters, or more with experts; each tensor repeats a
    few random rows."""
    experts = fields.get("num_local_experts", 0)
    make_checkpoint(path, "mixtral" if experts else "llama", dtype="bfloat16")
    config = json.loads((path / "config.json").read_text()) | fields
    hidden, inner, vocab = 1024, 4096, config["vocab_size"]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    (path / "config.json").write_text(json.dumps(config | sizes | heads))
    shapes = {"model.embed_tokens": (vocab, hidden)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (vocab, hidden)
    for layer in (f"model.layers.{index}" for index in range(layers)):
        shapes |= {f"{layer}.self_attn.{one}_proj": (hidden, hidden) for one in "qkvo"}
        if not experts:
            shapes |= {f"{layer}.mlp.{one}_proj": (inner, hidden) for one in ("gate", "up")}
            shapes[f"{layer}.mlp.down_proj"] = (hidden, inner)
            continue
        shapes[f"{layer}.block_sparse_moe.gate"] = (experts, hidden)
        for expert in (f"{layer}.block_sparse_moe.experts.{e}" for e in range(experts)):
            shapes |= {f"{expert}.w1": (inner, hidden), f"{expert}.w3": (inner, hidden)}
            shapes[f"{expert}.w2"] = (hidden, inner)
    norms = [f"model.layers.{index}.{kind}_layernorm" for index in range(layers) for kind in NORMS]
    tensors = {f"{name}.weight": torch.ones(hidden).bfloat16() for name in (*norms, "model.norm")}
    for name, (rows, columns) in shapes.items():
        few = (torch.randn(32, columns) * 0.02).bfloat16()
        tensors[f"{name}.weight"] = few.repeat(-(-rows // 32), 1)[:rows].clone()
    save_file(tensors, path / "model.safetensors")
    return path


def first_rows_repeated(tensor: torch.Tensor, kind: GGMLQuantizationType) -> QuantisedTensor:
    """A large tensor whose rows are quantised once."""
    matrix = tensor.flatten(0, -2)
    rows = quantise(matrix[:32], kind).blocks
    repeated = rows.repeat(-(-len(matrix) // len(rows)), 1)[: len(matrix)]
    return QuantisedTensor(kind, tuple(tensor.shape), repeated.view(*tensor.shape[:-1], -1))
