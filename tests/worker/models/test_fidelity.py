"""Our models against transformers, on small random checkpoints in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.api.sampling import Sampling
from tests.worker.checkpoints import FAMILIES, WRAPPED, make_checkpoint
from worker import Engine
from worker.layers.batch import Batch, Span

ROPE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        **{"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 32},
    "longrope": {
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 120,  # one prompt is longer, the others stay below
        "factor": 2.0,
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*FAMILIES, *WRAPPED)},
    "llama biases, tied, wide heads": (
        "llama",
        {
            **{"attention_bias": True, "mlp_bias": True, "head_dim": 32},
            "tie_word_embeddings": True,
        },
    ),
    **{
        f"llama {kind}": (
            "llama",
            {
                "head_dim": 16,
                "max_position_embeddings": 256,
                "rope_scaling": {"rope_type": kind, "rope_theta": 5e3, **more},
            },
        )
        for kind, more in ROPE.items()
    },
    "llama dynamic, beyond its positions": (
        "llama",
        {
            "max_position_embeddings": 100,
            "rope_scaling": {"rope_type": "dynamic", "rope_theta": 5e3, "factor": 2.0},
        },
    ),
    **{
        f"{family} sliding": (
            family,
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        )
        for family in ("qwen2", "qwen3")
    },
    "phi3 longrope, three quarters rotated": (
        "phi3",
        {
            **{"num_attention_heads": 2, "head_dim": 16, "partial_rotary_factor": 0.75},
            **{"max_position_embeddings": 512, "original_max_position_embeddings": 120},
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(6)],
                "long_factor": [2.0 + i for i in range(6)],
            },
        },
    ),
    "gemma2 without caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "smollm3 sliding, biases": (
        "smollm3",
        {
            **{"no_rope_layers": [1, 0, 0, 1, 1], "attention_bias": True, "mlp_bias": True},
            **{"use_sliding_window": True, "sliding_window": 7},
        },
    ),
    "olmo3 both ropes": (
        "olmo3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_theta": 300.0, "rope_type": "yarn"} | ROPE["yarn"],
            },
        },
    ),
    "olmo3 old fields": (
        "olmo3",
        {"rope_theta": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "glm4 no biases, all rotated": (
        "glm4",
        {"attention_bias": False, "partial_rotary_factor": 1.0},
    ),
    "mistral sliding": ("mistral", {"sliding_window": 9}),
    "qwen3_moe free weights, every other layer": (
        "qwen3_moe",
        {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []},
    ),
    "qwen2_moe no biases, sliding, dense first": (
        "qwen2_moe",
        {
            **{"qkv_bias": False, "norm_topk_prob": False, "mlp_only_layers": [0]},
            **{"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
        },
    ),
    "qwen3_moe gelu": ("qwen3_moe", {"hidden_act": "gelu_pytorch_tanh"}),
    **{f"llama {act}": ("llama", {"hidden_act": act}) for act in ("gelu", "gelu_new", "relu")},
    "qwen3 with more rows than tokens": ("qwen3", {"vocab_size": 700}),
    **{
        f"{family} ignores partial": (family, {"partial_rotary_factor": 0.5})
        for family in ("llama", "gemma3_text")
    },
    "qwen3 eps 0, yarn mscale 0": (
        "qwen3",
        {
            "rms_norm_eps": 0.0,
            "rope_scaling": {"rope_type": "yarn", "mscale_all_dim": 0.0, "mscale": 1.0}
            | ROPE["yarn"],
        },
    ),
    "gemma3 sliding rope alone": (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}},
    ),
    "gemma3 both ropes and a stretch": (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3 soft cap": ("gemma3_text", {"final_logit_softcapping": 5.0}),
}
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
    vocab = engine._core.model.vocab_size
    prompts = [torch.randint(vocab, (n,), generator=generator).tolist() for n in LENGTHS]
    with torch.no_grad():
        logits = [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]
    return Pair(engine, reference, prompts, logits)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_prompt_logits_are_those_of_transformers(pair: Pair) -> None:
    for prompt, expected in zip(pair.prompts, pair.logits, strict=True):
        assert relative(pair.engine.prompt_logits(prompt), expected) < 2e-4


def test_chunks_of_any_size_in_a_mixed_batch_give_the_same_logits(pair: Pair) -> None:
    """Three sequences in scattered slots, each step advancing by one token or by many."""
    model = pair.engine._core.model
    caches = model.make_caches()
    for cache in caches:
        cache.resize(4, 256, keep=0)
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
                    spans.append(Span(slots[which], at, ids, len(prompt), all_logits=True))
                    done[which] += len(ids)
            batch, ordered = Batch.prepare(spans, torch.device("cpu"))
            logits = iter(model(batch, caches))
            for span in ordered:
                rows[slots.index(span.slot)] += [next(logits) for _ in range(span.length)]
            turn += 1
    for ours, expected in zip(rows, pair.logits, strict=True):
        assert relative(torch.stack(ours), expected) < 2e-4


def test_greedy_tokens_are_those_of_transformers_alone_and_in_a_batch(pair: Pair) -> None:
    count = 64
    prompts = [prompt[:20] for prompt in pair.prompts]
    sampling = Sampling(temperature=0, max_tokens=count, ignore_eos=True)
    expected = [list(uncached(pair.reference, prompt, count)) for prompt in prompts]
    alone = [pair.engine.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    assert alone == expected
    # Unequal lengths, ending at different times, and more sequences than batch slots.
    limits = [count, 7, 30, 3, count, 12]
    mixed = pair.engine.generate(
        [prompts[i % 3] for i in range(6)],
        [sampling.model_copy(update={"max_tokens": limit}) for limit in limits],
    )
    for number, (one, limit) in enumerate(zip(mixed, limits, strict=True)):
        assert one.token_ids == expected[number % 3][:limit]


def uncached(model: Any, prompt: list[int], count: int) -> Iterator[int]:
    """Greedy continuation without a cache: the whole sequence is recomputed for every token."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            token = int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        ids.append(token)
        yield token


def test_scores_are_the_references_log_probabilities(pair: Pair) -> None:
    prompt = pair.prompts[0][:100]
    with torch.no_grad():
        expected = pair.reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    scores = pair.engine.score(prompt[:40], prompt[40:100])
    wanted = [float(expected[at - 1, prompt[at]]) for at in range(40, 100)]
    assert scores == pytest.approx(wanted, abs=1e-3)
    assert sum(scores) == pytest.approx(sum(wanted), abs=1e-3)


# One constant of a family, changed: the logits must differ.
DISTURBED: dict[str, tuple[str, dict[str, Any]]] = {
    "theta": ("llama", {"rope_theta": 9e3, "rope_parameters": None}),
    "eps": ("qwen3", {"rms_norm_eps": 1e-2}),
    "router normalisation": ("qwen3_moe", {"norm_topk_prob": False}),
    "experts per token, other names": ("mixtral", {"num_experts_per_tok": 3}),
    "merged tensors, fewer rotated": (
        "phi3",
        {"partial_rotary_factor": 0.5, "rope_parameters": None},
    ),
    "score cap": ("gemma2", {"attn_logit_softcapping": 2.5}),
    "logit cap": ("gemma2", {"final_logit_softcapping": 4.0}),
    "residual multiplier": ("granite", {"residual_multiplier": 0.6}),
    "attention multiplier": ("granite", {"attention_multiplier": 0.6}),
    "embedding multiplier": ("granite", {"embedding_multiplier": 4.0}),
    "logit divisor": ("granite", {"logits_scaling": 3.0}),
    "layers without rotary positions": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "window of three layers in four": ("olmo3", {"sliding_window": 5}),
    "partial rotary in pairs": (
        "glm4",
        {"partial_rotary_factor": 0.25, "rope_parameters": None},
    ),
    "unnormalised router": ("qwen2_moe", {"norm_topk_prob": False}),
    "experts per token": ("qwen3_moe", {"num_experts_per_tok": 3}),
    "window": ("gemma3_text", {"sliding_window": 5}),
    "window of all layers": ("mistral", {"sliding_window": 5}),
    "score scale": ("gemma3_text", {"query_pre_attn_scalar": 64}),
    "layer kinds": ("qwen3_5_text", {"rms_norm_eps": 1e-3}),
    "activation": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "partial rotary": (
        "qwen3_next",
        {"partial_rotary_factor": 0.5, "rope_parameters": None},
    ),
}


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
MISREAD: dict[str, tuple[str, str]] = {
    "norm offset": ("gemma3_text", "input_layernorm.weight"),
    "transposed weight": ("llama", "self_attn.q_proj.weight"),
    "query bias": ("qwen2", "self_attn.q_proj.bias"),
}


@pytest.mark.parametrize("name", MISREAD, ids=lambda name: name.replace(" ", "-"))
def test_a_wrongly_loaded_weight_changes_the_logits(name: str, tmp_path: Path) -> None:
    family, ending = MISREAD[name]
    path = make_checkpoint(tmp_path, family)
    prompt = list(range(5, 45))
    right = Engine.load(str(path), device="cpu", dtype="fp32").prompt_logits(prompt)
    edit_weights(
        path,
        lambda tensor: tensor.T if tensor.dim() == 2 else tensor + 1,
        [key for key in load_file(path / WEIGHTS) if key.endswith(ending)],
    )
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
