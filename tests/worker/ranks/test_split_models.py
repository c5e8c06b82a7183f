"""Models that are split over ranks, against the same models whole, in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jobs.errors import InvalidRequest
from tests.worker.checkpoints import make_checkpoint
from tests.worker.models.variants import CASES
from tests.worker.ranks.threads import load_part, on_ranks
from tests.worker.slot_storage import SlotStorage
from worker.device import Device
from worker.layers import expert_linears, linear
from worker.layers.batch import Batch, Span
from worker.layers.cache import Size
from worker.layers.linear import LinearFactory
from worker.layers.shard import WHOLE, Shard
from worker.layers.weights.linear_weight import LinearWeight
from worker.layers.weights.storage import store_linear
from worker.loading.load import load
from worker.model_spec import ModelSpec
from worker.models.model import Model

KEYS, VALUES = "linear_num_key_heads", "linear_num_value_heads"
ALL = {
    **CASES,
    **{
        f"{family} with a value head for each key head": (family, {KEYS: 4, VALUES: 4})
        for family in ("qwen3_next", "qwen3_5_text")
    },
}
CPU = torch.device("cpu")
CLOSE = 1e-4  # relative


def steps(model: Model) -> list[Tensor]:
    """The logits of prompts, then of a mixed step, then of two steps of single tokens."""
    caches = model.make_caches()
    SlotStorage(caches, 3, 256)
    ids = torch.randint(
        model.vocab_size, (170,), generator=torch.Generator().manual_seed(2)
    ).tolist()
    plans = (
        [Span(0, 0, ids[:25], 25, logits=25)],
        [Span(0, 25, ids[25:26], 25), Span(2, 0, ids[30:160], 130)],
        [Span(0, 26, ids[26:27], 25), Span(2, 130, ids[160:161], 130)],
        [Span(0, 27, ids[27:28], 25), Span(2, 131, ids[161:162], 130)],
    )
    with torch.inference_mode():
        return [model(Batch.prepare(plan, CPU)[0], caches).clone() for plan in plans]


def steps_of_part(folder: Path, shard: Shard) -> list[Tensor]:
    return steps(load_part(folder, "fp32", shard).model)


@pytest.mark.parametrize("name", ALL, ids=lambda name: name.replace(" ", "-"))
def test_logits_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    family, fields = ALL[name]
    folder = make_checkpoint(tmp_path, family, **fields)
    expected = steps(load_part(folder, "fp32", WHOLE).model)
    for ranks in (2, 4):
        if fields.get("num_attention_heads", 4) % ranks:
            continue
        first, *others = on_ranks(ranks, partial(steps_of_part, folder))
        for ours, whole in zip(first, expected, strict=True):
            assert ours.shape == whole.shape
            assert float((ours - whole).abs().max() / whole.abs().max()) < CLOSE
            assert ours.argmax(1).equal(whole.argmax(1))  # the greedy tokens
        assert len(others) == ranks - 1


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen3_next"])
def test_experts_in_one_product_are_split(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout on GPUs."""
    folder = make_checkpoint(tmp_path, family)
    expected = steps(load_part(folder, "fp32", WHOLE).model)
    monkeypatch.setattr(expert_linears, "runs_grouped", lambda device: True)
    for ranks in (2, 4):
        first = on_ranks(ranks, partial(steps_of_part, folder))[0]
        for ours, whole in zip(first, expected, strict=True):
            assert float((ours - whole).abs().max() / whole.abs().max()) < CLOSE


def test_a_vocabulary_that_does_not_divide_is_padded(tmp_path: Path) -> None:
    for tied in (True, False):
        folder = make_checkpoint(
            tmp_path / str(tied), "qwen3", vocab_size=1027, tie_word_embeddings=tied
        )
        expected = steps(load_part(folder, "fp32", WHOLE).model)
        first = on_ranks(4, partial(steps_of_part, folder))[0]
        for ours, whole in zip(first, expected, strict=True):
            assert ours.shape[1] == 1027
            assert float((ours - whole).abs().max() / whole.abs().max()) < CLOSE


@pytest.mark.parametrize(("family", "fields"), [("qwen3", {}), ("qwen3_5_text", {KEYS: 4})])
def test_each_rank_keeps_its_part_of_the_weights_and_of_the_cache(
    family: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, family, **fields)
    stored = 0

    def store(parts: Sequence[Any], *args: Any, **options: Any) -> LinearWeight:
        nonlocal stored
        stored += sum(part.nbytes for part in parts)
        return store_linear(parts, *args, **options)

    monkeypatch.setattr(linear, "store_linear", store)
    sizes, cached = [], []
    for shard in (WHOLE, Shard(0, 2), Shard(1, 2), Shard(3, 4)):
        stored = 0
        model = load_part(folder, "fp32", shard).model
        sizes.append(stored)
        cached.append([cache.bytes_for(Size(4, 64, 16)) for cache in model.make_caches()])
    assert sizes[1] == sizes[2]
    assert sizes[0] <= 2 * sizes[1] < 1.01 * sizes[0]  # the vocabulary is padded
    assert cached[1] == cached[2] == [nbytes // 2 for nbytes in cached[0]]
    if family == "qwen3":  # of four ranks, two share a key-value head: they have it twice
        assert cached[3] == cached[1]


@pytest.mark.parametrize(
    ("family", "fields", "ranks", "fact"),
    [
        ("qwen3", {}, 3, "its 4 attention heads can't be divided by 3 ranks"),
        (
            "qwen3",
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            2,
            "its 3 key-value heads can't be divided by 2 ranks",
        ),
        ("qwen3", {"intermediate_size": 49}, 2, "its 49 channels can't be divided by 2 ranks"),
        (
            "qwen3_5_text",
            {KEYS: 1, VALUES: 3},
            2,
            "its 3 recurrent value heads can't be divided by 2 ranks",
        ),
        (
            "qwen3_next",
            {KEYS: 3, VALUES: 6},
            2,
            "its 3 recurrent key heads can't be divided by 2 ranks",
        ),
    ],
)
def test_what_does_not_divide_is_refused_before_a_weight_is_read(
    family: str, fields: Mapping[str, Any], ranks: int, fact: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, **fields)

    def split(checked: Any) -> Shard:
        raise AssertionError("the checks come first")

    spec = ModelSpec(reference=str(folder), dtype="fp32", tensor_parallel=ranks)
    with pytest.raises(InvalidRequest) as caught:
        load(spec, Device(CPU), split=split)
    assert fact in caught.value.message
    assert f"tensor_parallel {ranks}" in caught.value.message


def test_a_bias_of_summed_outputs_is_added_once() -> None:
    """Of a linear split by rows: its ranks would add it again."""

    def run(shard: Shard) -> Tensor:
        made = LinearFactory(torch.float32, CPU, shard=shard).row(8, 3, bias=True)
        made.weight_slot().fill(torch.ones(3, 8))
        made.bias_slot().fill(torch.tensor([1.0, 2.0, 3.0]))
        return made(torch.ones(1, 8 // shard.ranks))

    for found in on_ranks(2, run):
        assert found.tolist() == [[9.0, 10.0, 11.0]]
