"""Every family and kind of cache with the branches that GPUs take, on a device without values:
devices and dtypes are right from the weights to the sampled token, and nothing is read back but by
the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jobs.api.request import ChatRequest
from jobs.api.sampling import Sampling
from tests.worker.checkpoints import make_shallow_checkpoint
from tests.worker.fake_device import DEVICE, Answers, Guard, answer, fake_device, load_engine
from worker import Engine
from worker import device as devices
from worker.device import BatchLimits
from worker.layers.batch import Batch, Following
from worker.layers.cache import LayerCache
from worker.layers.kv_cache import FullKVCache, WindowKVCache
from worker.layers.recurrent_cache import RecurrentCache
from worker.local.collect import CollectingSink
from worker.models.registry import FAMILIES
from worker.sampling import sampler
from worker.sampling.inputs import SamplingBatch, SamplingInput

PROMPTS = [[7] * 20, [8, 9, 10], [11]]
OPTIONS = Sampling(ignore_eos=True, max_tokens=2)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Prompts of more than 16 tokens take two steps."""
    small = BatchLimits(max_batch=4, step_tokens=16, stride=64, overlaps=True)
    monkeypatch.setattr(devices, "ACCELERATOR_LIMITS", small)
    return answer(monkeypatch)


def storage(cache: LayerCache) -> list[Tensor]:
    if isinstance(cache, RecurrentCache):
        return [cache.inputs, cache.state]
    assert isinstance(cache, FullKVCache | WindowKVCache)
    stored = cache.stored()
    return [stored.keys, stored.values]


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches of the engine's forward passes, each of which is checked."""
    batches: list[Batch] = []
    core = engine._core
    model = core.runner.model

    def forward(batch: Batch, caches: list[LayerCache]) -> Tensor:
        logits = model(batch, caches)
        rows = len(batch.token_ids) if batch.logits_rows is None else len(batch.logits_rows)
        assert logits.shape == (rows, core.vocab_size)
        # Logits that are capped or divided are float32.
        scaled = engine.info.family in ("gemma2", "granite")
        expected = torch.float32 if scaled else torch.bfloat16
        assert (logits.device, logits.dtype) == (DEVICE, expected)
        for cache in caches:
            *rest, last = storage(cache)
            assert {tensor.device for tensor in (*rest, last)} == {DEVICE}
            state = torch.float32 if isinstance(cache, RecurrentCache) else torch.bfloat16
            assert ({tensor.dtype for tensor in rest}, last.dtype) == ({torch.bfloat16}, state)
        batches.append(batch)
        return logits

    monkeypatch.setattr(core.runner, "model", forward)
    return batches


def kinds(batches: list[Batch]) -> set[str]:
    """The kinds of tokens in the batches: decoded ones and chunks."""
    found = set()
    for batch in batches:
        found |= {"later chunk" if chunk.start else "first chunk" for chunk in batch.chunks}
        if batch.decode is not None:
            found.add("dense slots" if batch.decode.rows is None else "sparse slots")
        if batch.decode is not None and batch.chunks:
            found.add("mixed")
    return found


# One model type of each family; others are wrappers around it. The parts of these are tested with
# others: Llama, Qwen3 and Mixtral, OLMo 3, and Qwen3.5 with experts.
COMPOSED = {"mistral", "qwen3_moe", "olmo2", "qwen3_5_text"}
SEPARATE = {*{made: name for name, made in FAMILIES.items()}.values()}


@pytest.mark.parametrize("family", sorted(SEPARATE - COMPOSED))
def test_a_family_generates_and_scores(
    family: str, tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_shallow_checkpoint(tmp_path / "model", family, dtype="bfloat16")
    lengths = (3, 1, 4)  # a slot becomes free between two others
    options = [OPTIONS.model_copy(update={"max_tokens": n, "temperature": 0}) for n in lengths]
    with fake_device():
        engine = load_engine(path)
        batches = watch(engine, monkeypatch)
        with Guard():
            generated = engine.generate(PROMPTS, options)
            assert engine.score([7] * 11, [5, 6, 7]) == [-0.5] * 3
            logits = engine.prompt_logits([8] * 3)
    assert [len(one.token_ids) for one in generated] == list(lengths)
    assert kinds(batches) == {
        *("first chunk", "later chunk", "dense slots", "sparse slots", "mixed")
    }
    assert logits.shape == (3, engine._core.vocab_size)
    assert answers.calls


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shallow_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", intermediate_size=64)


@pytest.fixture
def engine(path: Path, answers: Answers) -> Iterator[Engine]:
    with fake_device():
        yield load_engine(path)


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "min_p": {"min_p": 0.1},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "all truncations": {"top_k": 5, "top_p": 0.9, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.2},
    "presence and frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {"5": 3.0}},
    "minimum": {"min_tokens": 2, "ignore_eos": False},
    "allowed": {"allowed_token_ids": [1, 2, 3]},
    "bad words": {"bad_words": ["the"]},
    "logprobs": {"logprobs": True, "top_logprobs": 4},
}


def test_each_sampling_option(engine: Engine) -> None:
    for name, fields in SAMPLINGS.items():
        given = Sampling.model_validate({**OPTIONS.model_dump(exclude_none=True), **fields})
        with Guard():
            (generated,) = engine.generate([[3, 4]], given)
        assert len(generated.token_ids) == 2, name


def test_all_sampling_options_in_one_batch(engine: Engine) -> None:
    options = OPTIONS.model_dump(exclude_none=True)
    given = [Sampling.model_validate({**options, **one}) for one in SAMPLINGS.values()]
    with Guard():
        assert len(engine.generate([[3, 4]] * len(given), given)) == len(given)


def test_top_p_beyond_the_candidates_sorts_on_the_device(
    engine: Engine, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "CANDIDATES", 4)
    answers.true = False
    params = engine._core.sampling_params(Sampling(top_p=0.9), [1])
    batch = SamplingBatch()
    for choice in range(2):
        batch.add(SamplingInput(params, choice, [1]))
    with Guard():
        drawn = sampler.sample(torch.zeros(2, 100, device=DEVICE), batch)
    assert [one.token_id for one in drawn] == [1, 1]
    assert answers.calls == 3  # everything in one, and one sort per row


def test_prompt_logprobs_and_choices(engine: Engine) -> None:
    request = ChatRequest.parse(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "one two three " * 9}],
            **{"prompt_logprobs": 2, "logprobs": True, "n": 2, "max_tokens": 2},
        }
    )
    sink = CollectingSink()
    with Guard():
        chat = engine.submit(request, sink)
        while not chat.done:
            engine.step()
    completion = sink.completion()
    assert completion.prompt_logprobs is not None
    assert len(completion.prompt_logprobs) == completion.usage.prompt_tokens
    assert len(completion.choices) == 2


@pytest.mark.parametrize(("family", "dtype"), [("gemma2", "fp16"), ("qwen3_5_text", "fp32")])
def test_other_dtypes(family: str, dtype: str, tmp_path: Path, answers: Answers) -> None:
    path = make_shallow_checkpoint(tmp_path / "model", family)
    with fake_device():
        generate(load_engine(path, dtype))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
def test_steps_overlap(family: str, tmp_path: Path, answers: Answers) -> None:
    """Full attention and windows; a sequence ends by its length, and is left out."""
    path = make_shallow_checkpoint(tmp_path / "model", family, dtype="bfloat16")
    with fake_device():
        engine = load_engine(path)
    runner, rows = engine._core.runner, []
    follow = runner.follow

    def followed(following: Following, token_ids: Tensor) -> Tensor:
        assert token_ids.device == DEVICE
        rows.append(len(following.rows))
        return follow(following, token_ids)

    runner.follow = followed  # type: ignore[method-assign]
    options = [OPTIONS.model_copy(update={"max_tokens": n}) for n in (9, 6, 9)]
    with fake_device(), Guard():
        engine.generate(PROMPTS, options)
    assert {2, 3} <= {*rows}


def test_weights_that_stay_quantised(path: Path, answers: Answers) -> None:
    with fake_device():
        generate(load_engine(path, quantize="q8"))


def test_experts_that_stay_quantised(tmp_path: Path, answers: Answers) -> None:
    sizes = {"moe_intermediate_size": 64}
    path = make_shallow_checkpoint(tmp_path / "model", "qwen3_moe", dtype="bfloat16", **sizes)
    with fake_device():
        generate(load_engine(path, quantize="q8"))


def generate(engine: Engine) -> None:
    with Guard():
        assert len(engine.generate(PROMPTS, OPTIONS)) == len(PROMPTS)


def test_a_mask_of_the_host_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device test itself: a mask left on the CPU, in the decode group or in a chunk, fails."""
    visible = torch.zeros(1, 1, 1, 32)
    monkeypatch.setattr(Batch, "decode_mask", lambda batch, columns: visible)
    with Guard(), pytest.raises((RuntimeError, AssertionError), match="device"):
        engine.generate([[3]], OPTIONS)
