"""Our models against transformers, on small random checkpoints in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.api.sampling import Sampling
from tests.worker.checkpoints import FAMILIES, WRAPPED, make_checkpoint
from tests.worker.models.variants import CASES, DISTURBED
from tests.worker.slot_storage import SlotStorage
from worker import Engine
from worker.kernels import library
from worker.layers.batch import Batch, Span

WEIGHTS = "model.safetensors"
LENGTHS = (150, 11, 23)


class Pair(NamedTuple):
    engine: Engine
    reference: Any  # transformers' model
    prompts: list[list[int]]
    logits: list[torch.Tensor]  # the reference's, per prompt [length, vocab]


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    family, overrides = CASES[request.param]
    path = make_checkpoint(tmp_path_factory.mktemp("model"), family, **overrides)
    loader: Any = AutoModelForImageTextToText if family in WRAPPED else AutoModelForCausalLM
    reference = loader.from_pretrained(path, attn_implementation="eager")
    reference.eval()
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
    generator = torch.Generator().manual_seed(1)
    vocab = engine._core.runner.model.vocab_size
    prompts = [torch.randint(vocab, (n,), generator=generator).tolist() for n in LENGTHS]
    with torch.no_grad():
        logits = [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]
    return Pair(engine, reference, prompts, logits)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("way", ["kernels", "torch alone"])
def test_prompt_logits_are_those_of_transformers(
    pair: Pair, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "torch alone":
        monkeypatch.setattr(library, "active", lambda: None)
    elif library.active() is None:
        pytest.skip("this machine has no kernels")
    for prompt, expected in zip(pair.prompts, pair.logits, strict=True):
        assert relative(pair.engine.prompt_logits(prompt), expected) < 2e-4


def test_chunks_of_any_size_in_a_mixed_batch_give_the_same_logits(pair: Pair) -> None:
    """Three sequences in scattered slots, each step advancing by one token or by many."""
    model = pair.engine._core.runner.model
    caches = model.make_caches()
    SlotStorage(caches, 4, 256)
    slots, done = [0, 3, 1], [0, 0, 0]
    rows: list[list[torch.Tensor]] = [[], [], []]
    sizes = [9, 1, 4, 1, 1, 90, 1]
    turn = 0
    with torch.inference_mode():
        while any(at < len(prompt) for at, prompt in zip(done, pair.prompts, strict=True)):
            spans = []
            for which, prompt in enumerate(pair.prompts):
                at = done[which]
                ids = prompt[at : at + sizes[(turn + which) % len(sizes)]]
                if ids:
                    spans.append(Span(slots[which], at, ids, len(prompt), len(ids)))
                    done[which] += len(ids)
            batch, ordered = Batch.prepare(spans, torch.device("cpu"))
            logits = iter(model(batch, caches))
            for span in ordered:
                rows[slots.index(span.slot)] += [next(logits) for _ in range(span.length)]
            turn += 1
    for ours, expected in zip(rows, pair.logits, strict=True):
        assert relative(torch.stack(ours), expected) < 2e-4


def test_greedy_tokens_are_those_of_transformers_alone_and_in_a_batch(pair: Pair) -> None:
    count = 12
    prompts = [prompt[:20] for prompt in pair.prompts]
    sampling = Sampling(temperature=0, max_tokens=count, ignore_eos=True)
    alone = [pair.engine.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    for prompt, tokens in zip(prompts, alone, strict=True):
        assert len(tokens) == count
        assert tokens == greedy(pair.reference, prompt, tokens)
    # Unequal lengths, ending at different times, and more sequences than batch slots.
    limits = [count, 7, 10, 3, count, 9]
    mixed = pair.engine.generate(
        [prompts[i % 3] for i in range(6)],
        [sampling.model_copy(update={"max_tokens": limit}) for limit in limits],
    )
    for number, (one, limit) in enumerate(zip(mixed, limits, strict=True)):
        assert one.token_ids == alone[number % 3][:limit]


def greedy(model: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    """The model's choice in place of each token, given all tokens before it.

    Tokens that equal their choices are the model's greedy continuation.
    """
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    return [int(token) for token in logits[len(prompt) - 1 : -1].argmax(-1)]


def test_scores_are_the_references_log_probabilities(pair: Pair) -> None:
    prompt = pair.prompts[0][:100]
    with torch.no_grad():
        expected = pair.reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    scores = pair.engine.score(prompt[:40], prompt[40:100])
    wanted = [float(expected[at - 1, prompt[at]]) for at in range(40, 100)]
    assert scores == pytest.approx(wanted, abs=1e-3)
    assert sum(scores) == pytest.approx(sum(wanted), abs=1e-3)


@pytest.mark.parametrize("name", DISTURBED, ids=lambda name: name.replace(" ", "-"))
def test_a_changed_constant_changes_the_logits(name: str, tmp_path: Path) -> None:
    import json

    family, change = DISTURBED[name]
    path = make_checkpoint(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    prompt = list(range(5, 45))
    right = Engine.load(str(path), device="cpu", dtype="fp32").prompt_logits(prompt)
    (path / "config.json").write_text(json.dumps({**config, **change}))
    wrong = Engine.load(str(path), device="cpu", dtype="fp32").prompt_logits(prompt)
    assert relative(wrong, right) > 1e-3


def test_su_is_an_old_name_of_longrope(tmp_path: Path) -> None:
    """In the first Phi-3 checkpoints, which transformers 5.23 can't read."""
    import json

    family, overrides = CASES["phi3 longrope, three quarters rotated"]
    path = make_checkpoint(tmp_path, family, **overrides)
    config = json.loads((path / "config.json").read_text())
    prompt = list(range(5, 45))
    right = Engine.load(str(path), device="cpu", dtype="fp32").prompt_logits(prompt)
    rope = config.pop("rope_parameters")
    old = {key: rope[key] for key in ("short_factor", "long_factor")}
    config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    config["rope_scaling"] = {"type": "su", **old}
    (path / "config.json").write_text(json.dumps(config))
    old_name = Engine.load(str(path), device="cpu", dtype="fp32").prompt_logits(prompt)
    assert torch.equal(old_name, right)


# Weights that are loaded wrongly, where the shape does not reveal it.
def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T


def _offset(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def _rolled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(1, dims=-1)


MISREAD: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "norm offset": ("gemma3_text", "input_layernorm.weight", _offset),
    "transposed weight": ("llama", "self_attn.q_proj.weight", _transposed),
    "query bias": ("qwen2", "self_attn.q_proj.bias", _offset),
    "sinks": ("gpt_oss", "self_attn.sinks", _offset),
    "bias of the router": ("gpt_oss", "mlp.router.bias", _rolled),
    "gate and up in turn": ("gpt_oss", "mlp.experts.gate_up_proj", _rolled),
    "bias of the experts": ("gpt_oss", "mlp.experts.down_proj_bias", _offset),
}


@pytest.mark.parametrize("name", MISREAD, ids=lambda name: name.replace(" ", "-"))
def test_a_wrongly_loaded_weight_changes_the_logits(name: str, tmp_path: Path) -> None:
    family, ending, change = MISREAD[name]
    path = make_checkpoint(tmp_path, family)
    prompt = list(range(5, 45))
    right = Engine.load(str(path), device="cpu", dtype="fp32").prompt_logits(prompt)
    edit_weights(path, change, [key for key in load_file(path / WEIGHTS) if key.endswith(ending)])
    wrong = Engine.load(str(path), device="cpu", dtype="fp32").prompt_logits(prompt)
    assert relative(wrong, right) > 1e-3


def edit_weights(
    path: Path, change: Callable[[torch.Tensor], torch.Tensor], names: list[str]
) -> None:
    tensors = load_file(path / WEIGHTS)
    assert names
    for name in names:
        tensors[name] = change(tensors[name].clone()).contiguous()
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text"])
def test_stacked_experts_are_the_same_model(family: str, tmp_path: Path) -> None:
    """As Qwen3.5-MoE is published. transformers reads both layouts too."""
    from transformers import AutoModelForCausalLM

    path = make_checkpoint(tmp_path, family)
    prompt = list(range(5, 45))
    separate = Engine.load(str(path), device="cpu", dtype="fp32").prompt_logits(prompt)
    tensors = load_file(path / WEIGHTS)
    experts = sorted({key.split(".experts.")[0] for key in tensors if ".experts." in key})
    assert experts
    for prefix in experts:
        each = {
            part: [tensors.pop(f"{prefix}.experts.{i}.{part}_proj.weight") for i in range(4)]
            for part in ("gate", "up", "down")
        }
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in zip(each["gate"], each["up"], strict=True)]
        )
        tensors[f"{prefix}.experts.down_proj"] = torch.stack(each["down"])
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    stacked = Engine.load(str(path), device="cpu", dtype="fp32").prompt_logits(prompt)
    assert torch.equal(stacked, separate)
    reference: Any = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        assert relative(stacked, reference(torch.tensor([prompt])).logits[0]) < 2e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_close_to_float32_as_the_reference_in_bf16(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    # All experts of a mixture run: rounding must not decide which ones.
    path = make_checkpoint(tmp_path, family, dtype="bfloat16", num_experts_per_tok=4)
    prompt = list(range(5, 69))
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        truth = exact(torch.tensor([prompt])).logits[0]
        half = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16")
        theirs = half(torch.tensor([prompt])).logits[0].float()
    ours = Engine.load(str(path), device="cpu", dtype="auto").prompt_logits(prompt)
    error = (theirs - truth).square().mean().sqrt()
    assert (ours - truth).square().mean().sqrt() < 1.5 * error
