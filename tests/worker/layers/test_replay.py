"""Decode steps that are made again by recorded kernel calls have the logits of computed ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jobs.api.sampling import Sampling
from tests.worker.checkpoints import make_checkpoint
from tests.worker.slot_storage import SlotStorage
from worker import Engine
from worker.kernels import library, recording
from worker.kernels.elementwise import rms_norm
from worker.layers import replay, rope
from worker.layers.batch import Batch, Span
from worker.layers.replay import Form, Inputs, Step
from worker.layers.weights import bf16
from worker.models.model import Decoder

pytestmark = pytest.mark.skipif(library.active() is None, reason="needs the CPU kernels")

# In bf16, they call nothing but kernels.
RECORDED = ("llama", "qwen3", "qwen2", "gemma3_text", "qwen3_moe", "gpt_oss")
COMPUTED = ("qwen3_5_text",)
FIRST = torch.tensor([0])
CASES = [
    *((family, "bf16") for family in (*RECORDED, *COMPUTED)),
    ("qwen3", "fp32"),  # torch computes its products
    ("llama", "q8"),  # bf16 with quantised weights, the embedding's too
    ("gemma3_text", "q8"),
]


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded at their second time, so that few steps test many recordings."""
    monkeypatch.setattr(replay, "RECORDED_AT", 2)


def load(folder: Path, family: str, dtype: str = "bf16", **fields: Any) -> Engine:
    shape: dict[str, Any] = {"intermediate_size": 64, "head_dim": 16, **fields}
    if family == "qwen3_moe":
        shape["moe_intermediate_size"] = 32
    if family == "gemma3_text":
        shape["sliding_window"] = 48  # some chunks end beyond it
    path = make_checkpoint(folder, family, **shape)
    quantize = None if dtype in ("bf16", "fp32") else dtype
    return Engine.load(
        str(path),
        device="cpu",
        dtype="bf16" if quantize else dtype,
        quantize=quantize,
        max_batch=8,
        prefix_cache=False,
    )


def decoder_of(engine: Engine) -> Decoder:
    model = engine._core.runner.model
    assert isinstance(model, Decoder)
    return model


@contextmanager
def computed(model: Decoder) -> Iterator[None]:
    """Without recorded steps."""
    before = model._replay.most_rows
    model._replay.most_rows = 0
    yield
    model._replay.most_rows = before


class Run:
    """One model with caches of its own; `step` appends tokens to some of its slots."""

    def __init__(self, model: Decoder, slots: int, columns: int) -> None:
        self._model, self._caches = model, model.make_caches()
        self._storage = SlotStorage(self._caches, slots, columns)
        self._lengths = [0] * slots

    def resize(self, slots: int, columns: int) -> None:
        self._storage.resize(slots, columns)
        self._lengths += [0] * (slots - len(self._lengths))

    def step(self, ids: dict[int, list[int]], *, last: bool = False) -> Tensor:
        """Logits after each token, or after the last one of each sequence."""
        logits = self._model(self._batch(ids, last=last), self._caches)
        for slot, tokens in ids.items():
            self._lengths[slot] += len(tokens)
        return logits

    def draft_tokens(self, ids: dict[int, list[int]], count: int, vocab: int) -> list[list[int]]:
        """The most likely tokens after these; nothing is kept of them."""
        found = self._model.draft_tokens(self._batch(ids, last=True), self._caches, count, vocab)
        for best, _ in found:
            assert bool(best.isfinite().all()) and best.dtype is torch.float32
        for slot, tokens in ids.items():
            self._lengths[slot] += len(tokens)
        return [chosen.tolist() for _, chosen in found]

    def _batch(self, ids: dict[int, list[int]], *, last: bool) -> Batch:
        spans = [
            Span(slot, self._lengths[slot], tokens, 9, 1 if last else len(tokens))
            for slot, tokens in sorted(ids.items(), key=lambda item: len(item[1]))
        ]
        return Batch.prepare(spans, torch.device("cpu"))[0]


@torch.inference_mode()
@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_random_steps_have_equal_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    """Prompts, one or a few tokens of any of the slots, and caches that grow in between."""
    engine = load(tmp_path, family, dtype)
    model, draw = decoder_of(engine), random.Random(family)
    recorded, plain = Run(model, 4, 96), Run(model, 4, 96)
    made: list[Form] = []
    call = Step.__call__

    def noted(self: Step[Tensor], inputs: Inputs, stored: Any) -> Tensor:
        made.append(tuple(chunk.length for chunk in inputs.batch.chunks))
        return call(self, inputs, stored)

    monkeypatch.setattr(Step, "__call__", noted)
    for number in range(100):
        slots = sorted(draw.sample(range(4), draw.randint(1, 4)))
        lengths = [20] if number in (0, 40) else [1] if number % 3 else [1, 2]
        ids = {slot: [draw.randrange(100) for _ in range(draw.choice(lengths))] for slot in slots}
        if number == 50:
            for run in (recorded, plain):
                run.resize(6, 160)
        logits = recorded.step(ids)
        with computed(model):
            expected = plain.step(ids)
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    if family in RECORDED and dtype != "fp32":
        assert len(made) > 50 and any(made), "single tokens and chunks"
    else:
        assert not made


@torch.inference_mode()
@pytest.mark.parametrize(("family", "dtype"), [case for case in CASES if case[0] in RECORDED])
def test_the_most_likely_tokens_are_those_of_single_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    """Of any of the slots after one or two tokens, while caches and tables of positions grow."""
    model, draw = decoder_of(load(tmp_path, family, dtype)), random.Random(family)
    monkeypatch.setattr(rope, "LEAST_ROWS", 32)
    drafting, single = Run(model, 4, 96), Run(model, 4, 96)
    made: list[tuple[int, int]] = []  # numbers of chunks and of passes
    call = Step.__call__

    def noted(self: Step[Any], inputs: Inputs, stored: Any) -> Any:
        made.append((len(inputs.batch.chunks), self._passes))
        return call(self, inputs, stored)

    monkeypatch.setattr(Step, "__call__", noted)
    for number in range(60):
        slots = sorted(draw.sample(range(4), draw.randint(1, 2)))
        ids = {slot: [draw.randrange(100) for _ in range(draw.choice([1, 2]))] for slot in slots}
        if number == 30:
            for run in (drafting, single):
                run.resize(6, 160)
        count, vocab = draw.randint(1, 3), 90  # the last tokens are not wanted
        drafts = drafting.draft_tokens(ids, count, vocab)
        order, found = sorted(ids, key=lambda slot: len(ids[slot])), []
        with computed(model):
            for _ in range(count):
                logits = single.step(ids, last=True)[:, :vocab]
                rows = sorted(ids, key=lambda slot: (len(ids[slot]), slot))
                ids = {
                    slot: [token]
                    for slot, token in zip(rows, logits.argmax(-1).tolist(), strict=True)
                }
                found.append([ids[slot][0] for slot in order])
        assert drafts == found
        single._lengths[:] = drafting._lengths
    chunks, passes = {one[0] for one in made}, {one[1] for one in made}
    if dtype == "fp32":
        assert not made
    else:
        assert passes == {1, 2, 3} and len(made) > 5 and chunks >= {0, 1}


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["bf16", "q8"])
def test_a_token_beyond_the_table_is_refused_by_every_step(tmp_path: Path, dtype: str) -> None:
    model = decoder_of(load(tmp_path, "qwen3", dtype))
    run = Run(model, 1, 32)
    for _ in range(3):
        with pytest.raises(IndexError, match="beyond"):
            run.step({0: [model.vocab_size]})
        run.step({0: [model.vocab_size - 1]})
    assert model._replay._steps


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_whole_step_of_a_quantised_model_is_recorded(tmp_path: Path, family: str) -> None:
    """Its embedding too: a step's inputs are numbers of the batch only."""
    model = decoder_of(load(tmp_path, family, "q8"))
    run = Run(model, 2, 32)
    for _ in range(3):
        run.step({0: [1], 1: [2]})
    (step,) = model._replay._steps.values()
    assert step.usable and step._inputs.x is None


def test_generated_tokens_are_the_same(tmp_path: Path) -> None:
    engine = load(tmp_path, "qwen3")
    model, prompts = decoder_of(engine), [[5, 6, 7], [8] * 20, [9]]
    options = [
        Sampling(temperature=0, max_tokens=40, ignore_eos=True),
        Sampling(temperature=1, seed=1, max_tokens=30, ignore_eos=True, repetition_penalty=1.5),
        Sampling(temperature=1, seed=2, max_tokens=20, ignore_eos=True),
    ]
    recorded = [one.token_ids for one in engine.generate(prompts, options)]
    singles = [form[3] for form in model._replay._steps if len(form) == 4]
    assert sorted(singles) == [1, 2, 3]
    model._replay.most_rows = 0
    assert [one.token_ids for one in engine.generate(prompts, options)] == recorded


def test_steps_with_more_rows_than_kernels_multiply_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bf16, "most_rows", lambda: 2)
    model = decoder_of(load(tmp_path, "qwen3", "bf16"))
    run = Run(model, 4, 32)
    recorded: list[int] = []
    make = Step.__init__

    def noted(self: Step[Tensor], compute: Any, inputs: Inputs, *rest: Any) -> None:
        recorded.append(len(inputs.batch.token_ids))
        make(self, compute, inputs, *rest)

    monkeypatch.setattr(Step, "__init__", noted)
    with torch.inference_mode():
        for rows in (4, 2, 3):
            for _ in range(3):
                run.step({slot: [1] for slot in range(rows)})
    assert recorded == [4, 2, 3]
    assert model._replay.most_rows == 2
    assert [step.usable for step in model._replay._steps.values()] == [False, True, False]


def test_a_recorded_step_holds_the_memory_of_one_layer(tmp_path: Path) -> None:
    taken = []
    for layers in (2, 8):
        folder = tmp_path / str(layers)
        model = decoder_of(load(folder, "qwen3", "q8", num_hidden_layers=layers))
        run = Run(model, 64, 32)
        with torch.inference_mode():
            for _ in range(2):
                run.step({slot: [1] for slot in range(64)})
        (step,) = model._replay._steps.values()
        assert step.usable
        taken.append(model._replay._arena.held)
    assert taken[0] == taken[1]


def test_other_numbers_of_threads_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder_of(load(tmp_path, "qwen3"))
    run = Run(model, 4, 32)
    with torch.inference_mode():
        for _ in range(2):
            run.step({0: [1], 1: [1]})
        (step,) = model._replay._steps.values()
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(threads + 1)
            monkeypatch.setattr(Step, "__call__", None)  # it is not called
            run.step({0: [1], 1: [1]})
        finally:
            torch.set_num_threads(threads)
    assert list(model._replay._steps.values()) == [step]


def test_a_position_outside_of_the_cache_is_refused(tmp_path: Path) -> None:
    model = decoder_of(load(tmp_path, "qwen3"))
    run = Run(model, 1, 16)
    with torch.inference_mode():
        for _ in range(16):
            run.step({0: [1]})
        with pytest.raises(IndexError, match="17 columns"):
            run.step({0: [1]})


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda x: x * 2, "mul"),
        (lambda x: torch.add(x, x, alpha=2), "add"),
        (lambda x: x[FIRST], "index"),
        (lambda x: x.t().contiguous(), "contiguous"),
        (lambda x: x.zero_(), "zero_"),
        (lambda x: x.max().item(), "max"),
    ],
)
def test_what_cannot_be_made_again_is_refused(operation: Any, name: str) -> None:
    x, weight = torch.ones(2, 16), torch.ones(16)
    with torch.inference_mode(), recording.record(recording.Arena()) as found:
        rms_norm(x.view(-1, 16), weight, 1e-6)
        reasons = [found.refused]
        operation(x)
    assert reasons == [None] and name in str(found.refused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_made_again_read_new_values(dtype: torch.dtype) -> None:
    x, weight = torch.ones(2, 21, dtype=dtype), torch.ones(21, dtype=dtype)
    with torch.inference_mode(), recording.record(recording.Arena()) as found:
        y = rms_norm((x + x) * 0.3, weight, 0.0)
        y += x
    assert found.refused is None
    x[:] = torch.arange(42.0).view(2, 21)
    with torch.inference_mode():
        found.program()
        expected = rms_norm((x + x) * 0.3, weight, 0.0) + x
    assert torch.equal(y, expected)
    assert library.require() is library.active()


@torch.inference_mode()
def test_only_steps_that_come_often_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts have as many lengths as there are prompts: a form that comes now and then would be
    recorded again each time, after others have taken its place."""
    monkeypatch.setattr(replay, "RECORDED_AT", 3)
    monkeypatch.setattr(replay, "MOST_STEPS", 1)
    model = decoder_of(load(tmp_path, "llama"))
    run = Run(model, 2, 96)
    recorded: list[int] = []
    make = Step.__init__

    def noted(self: Step[Tensor], compute: Any, inputs: Inputs, *rest: Any) -> None:
        recorded.append(len(inputs.batch.token_ids))
        make(self, compute, inputs, *rest)

    monkeypatch.setattr(Step, "__init__", noted)
    one, two = {0: [1]}, {0: [1], 1: [1]}
    for ids, expected in [
        (one, []), (one, []), (two, []), (one, [1]), (one, [1]),
        (two, [1]), (two, [1, 2]), (two, [1, 2]),  # takes the place of the first
        (one, [1, 2]), (one, [1, 2]), (one, [1, 2, 1]),
    ]:  # fmt: skip
        run.step(ids)
        assert recorded == expected
