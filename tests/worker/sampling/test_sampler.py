"""The sampler draws from the distribution of transformers' logits processors."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from jobs.api.sampling import Sampling
from tests.worker.sampling.resolved import resolved
from worker.checkpoint.config import GenerationDefaults
from worker.sampling.inputs import SamplingBatch, SamplingInput
from worker.sampling.params import resolve_params
from worker.sampling.sampler import CANDIDATES, Sampled, sample, uniform

VOCAB = 3000
params = partial(resolved, VOCAB)


def logits(seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def batch(*inputs: SamplingInput) -> SamplingBatch:
    made = SamplingBatch()
    for one in inputs:
        made.add(one)
    return made


def drawn(rows: torch.Tensor, *inputs: SamplingInput) -> list[Sampled]:
    return sample(rows, batch(*inputs))


def draw(
    row: torch.Tensor,
    *,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    **fields: object,
) -> int:
    return drawn(row.clone()[None], SamplingInput(params(**fields), 0, prompt, output))[0].token_id


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0, "presence_penalty": 1.0},
        {"temperature": 0, "logprobs": True, "top_logprobs": 2},
        {"temperature": 0.7, "seed": 1, "top_p": 0.9},
    ],
    ids=str,
)
def test_rows_in_bf16_are_drawn_as_in_float32_and_stay_as_they_are(fields: dict[str, Any]) -> None:
    """They are in the memory of a recorded step. Each greatest logit comes several times."""
    rows = torch.stack([logits(seed) for seed in range(3)]).bfloat16()
    rows[:, 100::1000] = 50
    draws = [SamplingInput(params(**fields), 0, (5, 6), (7, 7)) for _ in rows]
    before = rows.clone()
    assert drawn(rows, *draws) == drawn(rows.float(), *draws)
    assert torch.equal(rows, before)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 5.0, "top_p": 0.999},  # needs more tokens than the candidates
        {"temperature": 0.8, "top_k": 50, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 100, "top_p": 0.95, "min_p": 0.02},
        {"temperature": 1.0, "top_k": 2000},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_of_transformers(fields: dict[str, float]) -> None:
    """Each token is drawn with its probability."""
    row = logits(1)
    warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(float(fields["temperature"]))])
    if "top_k" in fields:
        warpers.append(TopKLogitsWarper(int(fields["top_k"])))
    if "top_p" in fields:
        warpers.append(TopPLogitsWarper(fields["top_p"]))
    if "min_p" in fields:
        warpers.append(MinPLogitsWarper(fields["min_p"]))
    expected = warpers(torch.zeros(1, 0, dtype=torch.long), row[None].clone()).softmax(-1)[0]
    count = 3000
    found = drawn(
        row.repeat(count, 1),
        *(SamplingInput(params(seed=seed, **fields), 0, (), ()) for seed in range(count)),
    )
    counts = torch.bincount(torch.tensor([s.token_id for s in found]), minlength=VOCAB)
    assert not counts[expected == 0].any(), "a truncated token was drawn"
    likely = expected > 0.01
    error = (counts / count - expected)[likely].abs()
    deviation = (expected * (1 - expected) / count).sqrt()[likely]
    assert (error < 5 * deviation).all()


def test_the_candidates_are_fewer_than_the_vocabulary() -> None:
    assert CANDIDATES < VOCAB  # otherwise the test above covers less


def test_other_rows_never_change_a_draw() -> None:
    rng = random.Random(0)
    choices: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.5},
        {"temperature": 1.0, "top_k": 1500},
        {"temperature": 1.0, "presence_penalty": 1.0},
    ]
    for trial in range(20):
        rows = [rng.choice(choices) for _ in range(6)]
        draws = [
            SamplingInput(params(seed=trial, **r), i, (1, 2), (5, 6, 7)) for i, r in enumerate(rows)
        ]
        stacked = torch.stack([logits(100 * trial + i) for i in range(6)])
        together = [s.token_id for s in drawn(stacked.clone(), *draws)]
        alone = [drawn(stacked[i : i + 1].clone(), draws[i])[0].token_id for i in range(6)]
        assert together == alone


def test_the_random_number_depends_on_seed_choice_and_position() -> None:
    base = uniform(1, 2, 3)
    assert base == uniform(1, 2, 3)
    assert len({base, uniform(0, 2, 3), uniform(1, 0, 3), uniform(1, 2, 0)}) == 4
    uniforms = [uniform(7, 0, position) for position in range(2000)]
    assert all(0 <= n < 1 for n in uniforms)
    assert abs(sum(uniforms) / 2000 - 0.5) < 0.03


def test_greedy_takes_the_most_likely_token() -> None:
    row = logits(3)
    assert draw(row, temperature=0) == int(row.argmax())


@pytest.mark.parametrize("temperature", [9e-6, 1e-30, 1e-37, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_tiny_temperatures_are_greedy(temperature: float, fields: dict[str, Any]) -> None:
    row = logits(4, spread=20.0)
    drawn = {draw(row, temperature=temperature, seed=seed, **fields) for seed in range(20)}
    assert drawn == {int(row.argmax())}


@pytest.mark.parametrize("temperature", [1e-5, 100])
@pytest.mark.parametrize("penalty", [0.01, 100])
def test_extreme_options_draw_finite_tokens(temperature: float, penalty: float) -> None:
    row = logits(4, spread=1000.0)
    fields = {"temperature": temperature, "repetition_penalty": penalty, "seed": 1}
    (one,) = drawn(row[None], SamplingInput(params(**fields), 0, (5, 6), (7,)))
    assert one.finite and 0 <= one.token_id < VOCAB


@pytest.mark.parametrize(("given", "used"), [(1e-300, 0.01), (1e300, 100), (1.1, 1.1)])
def test_a_repetition_penalty_of_the_model_is_clamped(given: float, used: float) -> None:
    defaults = GenerationDefaults(repetition_penalty=given)
    made = resolve_params(
        Sampling(), defaults, prompt_length=3, context_length=1000, vocab_size=VOCAB
    )
    assert made.repetition_penalty == used


def test_a_repetition_penalty_that_overflows_is_refused_in_a_request() -> None:
    with pytest.raises(ValueError, match="repetition_penalty"):
        Sampling(repetition_penalty=1e-300)


def test_repetition_penalty_looks_back_64_tokens_as_transformers_does_on_those() -> None:
    row = logits(4)
    old, recent = (7,), tuple(range(100, 164))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([recent]), row[None].clone())
    best = int(expected.argmax())
    favourite = int(row.argmax())
    row[7] = row[favourite] + 1  # the most likely token occurred before the window
    assert draw(row, prompt=old + recent, temperature=0, repetition_penalty=1.7) == 7
    row[7] = -10
    assert draw(row, prompt=old + recent, temperature=0, repetition_penalty=1.7) == best


def test_presence_and_frequency_penalties_count_the_completion_alone() -> None:
    row = torch.zeros(VOCAB)
    row[10], row[11] = 1.0, 0.5
    fields: dict[str, Any] = {"temperature": 0, "presence_penalty": 0.3, "frequency_penalty": 0.1}
    assert draw(row, prompt=(10, 10, 10), **fields) == 10
    assert draw(row, output=(10,), **fields) == 10  # 1 - 0.3 - 0.1 = 0.6
    assert draw(row, output=(10, 10, 10), **fields) == 11  # 1 - 0.3 - 0.3 = 0.4


def test_logit_bias_can_force_and_ban_tokens() -> None:
    row = logits(5)
    best = int(row.argmax())
    assert draw(row, temperature=0, logit_bias={17: 100}) == 17
    assert draw(row, temperature=0, logit_bias={best: -100}) != best


def test_no_stop_token_before_min_tokens() -> None:
    row = logits(6)
    row[2] = 50
    assert draw(row, temperature=0) == 2
    assert draw(row, temperature=0, min_tokens=2, output=(4,)) != 2
    assert draw(row, temperature=0, min_tokens=2, output=(4, 4)) == 2


def test_logprobs_are_taken_before_penalties() -> None:
    row = logits(7)
    fields = {"temperature": 0.5, "top_k": 3, "logprobs": True, "top_logprobs": 4, "seed": 1}
    expected = row.log_softmax(-1)
    draws = [SamplingInput(params(logit_bias={9: 5.0}, **fields), 0, (), ())]
    sampled = drawn(row.clone()[None], *draws)[0]
    assert sampled.logprob == pytest.approx(float(expected[sampled.token_id]), abs=1e-5)
    values, ids = expected.topk(4)
    assert [i for i, _ in sampled.top] == ids.tolist()
    assert [p for _, p in sampled.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_a_row_of_nan_is_reported_and_does_not_affect_others() -> None:
    rows = torch.stack([logits(8), torch.full((VOCAB,), float("nan")), logits(9)])
    inputs = [SamplingInput(params(temperature=1, seed=3), i, ()) for i in range(3)]
    found = drawn(rows.clone(), *inputs)
    assert [s.finite for s in found] == [True, False, True]
    alone = drawn(rows[2:].clone(), inputs[2])
    assert found[2].token_id == alone[0].token_id


OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"logit_bias": {"3": 4.0}},
    {"min_tokens": 4},
    {"allowed_token_ids": [*range(40)]},
    {"logprobs": True, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("fields", OPTIONS, ids=str)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_tokens_after_a_draft_are_drawn_as_if_it_were_the_output(
    fields: dict[str, Any], temperature: float
) -> None:
    """And the draft leaves no trace in what is drawn next."""
    options = params([9], [5, 11], [11, 5, 7], temperature=temperature, seed=5, **fields)
    prompt, output, draft = (7, 7, 3), [5, 2, 11], [5, 11, 7]
    rows = torch.stack([logits(seed) for seed in range(4)])
    rows[:, [2, 5, 11]] += 8
    made, sampling = SamplingBatch(), SamplingInput(options, 1, prompt, output)
    made.add(sampling, draft)
    expected = [
        drawn(rows[at : at + 1].clone(), SamplingInput(options, 1, prompt, output + draft[:at]))[0]
        for at in range(4)
    ]
    assert sample(rows.clone(), made) == expected
    assert drawn(rows[:1].clone(), sampling) == expected[:1]
    sampling.advance(draft[:2])
    assert drawn(rows[2:3].clone(), sampling) == expected[2:3]
