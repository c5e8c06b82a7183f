"""Drafts change the number of tokens per step, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from jobs.api.answer import ChatCompletion
from jobs.api.request import ChatRequest
from jobs.api.sampling import Sampling
from tests.worker.checkpoints import KINDS, make_checkpoint, make_shallow_checkpoint
from tests.worker.engine.drafted import mixed_requests, perturbed
from worker import Engine
from worker.backend import Outcome
from worker.engine.scheduled import ScheduledSequence, Selected
from worker.kernels import library
from worker.layers.batch import Batch
from worker.layers.cache import LayerCache
from worker.local.collect import CollectingSink
from worker.speculative.draft_costs import DraftCosts

REQUESTS, IN_BF16 = 20, 8
SEED = 5  # with it, every model repeats itself at least once: n-grams find a draft
# Checkpoints whose products are computed by kernels.
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
SERVED: dict[str, dict[str, Any]] = {
    "full": {"family": "qwen3"},
    "window": {"family": "gemma3_text"},
    "recurrent": {
        "family": "qwen3_5_text",
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "recurrent-grouped": {
        "family": "qwen3_next",
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}
REPEATED = [*range(5, 30)] * 3

Load = Callable[..., Engine]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "target"
    return make_shallow_checkpoint(path, KINDS[request.param])


@pytest.fixture(scope="module")
def drafts(folder: Path) -> dict[str, str]:
    """Of each kind: one that is mostly right, one that never is, and none."""
    near = perturbed(folder, folder.parent / "near")
    small: dict[str, Any] = {"num_hidden_layers": 1, "tie_word_embeddings": True}
    far = make_checkpoint(folder.parent / "far", "qwen3", seed=9, **small)
    return {"near": str(near), "far": str(far), "ngram": "ngram"}


def load_engine(folder: Path, **options: Any) -> Engine:
    options = {"max_batch": 4, "dtype": "fp32", **options}
    engine = Engine.load(str(folder), device="cpu", **options)
    engine._core.speculation._costs = None  # draft whatever it costs
    return engine


@pytest.fixture
def load(folder: Path) -> Load:
    return partial(load_engine, folder)


def outcomes(engine: Engine, requests: list[dict[str, Any]]) -> list[Outcome]:
    """Of requests that are submitted a few at a time."""
    sinks = [CollectingSink() for _ in requests]
    running: list[Any] = []
    for request, sink in zip(requests, sinks, strict=True):
        running.append(engine.submit(ChatRequest.parse(request), sink))
        while sum(not one.done for one in running) >= 8:
            engine.step()
    while engine.step():
        pass
    found = [sink.outcome for sink in sinks]
    assert None not in found
    return found  # type: ignore[return-value]


def answer(outcome: Outcome) -> tuple[Any, list[float]]:
    """Everything in an answer but its ids, times and the figures of the draft; and its
    log-probabilities, which are rounded in another way when more tokens are computed together."""
    assert isinstance(outcome.result, ChatCompletion), outcome.error
    choices = [choice.model_dump() for choice in outcome.result.choices]
    for choice in choices:
        for call in choice["message"]["tool_calls"] or ():
            call["id"] = ""
    numbers: list[float] = []
    return (outcome.output_token_ids, _without_numbers(choices, numbers)), numbers


def _without_numbers(value: Any, numbers: list[float]) -> Any:
    if isinstance(value, float):
        numbers.append(value)
        return None
    if isinstance(value, dict):
        return {key: _without_numbers(one, numbers) for key, one in value.items()}
    return [_without_numbers(one, numbers) for one in value] if isinstance(value, list) else value


class Plain(NamedTuple):
    """Answers to requests of all kinds without a draft."""

    outcomes: list[Outcome]
    steps: int


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    engine = load_engine(folder)
    found = outcomes(engine, mixed_requests(REQUESTS, SEED))
    return Plain(found, engine._core.steps)


@pytest.mark.parametrize("draft", ["near", "far", "ngram"])
def test_requests_of_all_kinds_have_the_tokens_that_they_have_without_a_draft(
    load: Load, plain: Plain, drafts: dict[str, str], draft: str
) -> None:
    drafted = load(draft=drafts[draft])
    found_outcomes = outcomes(drafted, mixed_requests(REQUESTS, SEED))
    for expected, found in zip(plain.outcomes, found_outcomes, strict=True):
        (tokens, numbers), (expected_tokens, expected_numbers) = answer(found), answer(expected)
        assert tokens == expected_tokens
        assert numbers == pytest.approx(expected_numbers, abs=1e-3)
    figures = drafted._core.speculation
    assert figures.drafted_tokens > 0
    if draft != "ngram":  # random models seldom repeat themselves
        assert figures.drafted_tokens - figures.accepted_tokens > 10  # rejected
    if draft == "near":
        assert figures.accepted_tokens > figures.drafted_tokens / 3
        assert drafted._core.steps < plain.steps


@pytest.mark.skipif(library.active() is None, reason="other products depend on the rows")
@pytest.mark.parametrize("fields", SERVED.values(), ids=SERVED)
def test_one_at_a_time_in_bf16_drafts_change_no_bit(fields: dict[str, Any], tmp_path: Path) -> None:
    """The CPU kernels compute a few rows of a sequence as they compute each alone, in full windows
    and recurrent layers as well. Products of six rows add in another order, and recurrent layers
    compute what was accepted again, with the next drafts."""
    model = make_checkpoint(tmp_path / "target", **WIDE, **fields)
    near = perturbed(model, tmp_path / "near")
    requests = mixed_requests(IN_BF16)
    options: dict[str, Any] = {"device": "cpu", "dtype": "bf16", "max_batch": 1}
    plain = Engine.load(str(model), **options)
    drafts = 2 if "linear_key_head_dim" in fields else 4
    drafted = Engine.load(str(model), draft=str(near), draft_tokens=drafts, **options)
    drafted._core.speculation._costs = None  # draft whatever it costs
    for expected, found in zip(outcomes(plain, requests), outcomes(drafted, requests), strict=True):
        assert answer(found) == answer(expected)
    assert drafted._core.speculation.accepted_tokens > 25


def test_drafts_that_pause_and_start_again_change_no_token(
    load: Load, drafts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock by which drafts cost nothing, then much, in turn."""
    plain, drafted = load(), load(draft=drafts["near"])
    core, model, now = drafted._core, drafted._core.runner.model, [0.0]
    core.speculation._costs = DraftCosts(lambda: now[0])

    def timed(batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        further = max(0, len(batch.token_ids) - 3) * (0.005 if core.steps // 25 % 2 else 0)
        now[0] += 0.01 + further
        return model(batch, caches)

    monkeypatch.setattr(core.runner, "model", timed)
    steps = []  # whether each had drafts
    extend = core.speculation.extend

    def watched(scheduled: Sequence[Selected]) -> list[ScheduledSequence]:
        parts = extend(scheduled)
        steps.append("g" if any(part.draft.token_ids for part in parts) else "p")
        return parts

    monkeypatch.setattr(core.speculation, "extend", watched)
    drawn = [
        Sampling(temperature=0.5, seed=seed, max_tokens=160, ignore_eos=True)
        for seed in range(3, 6)
    ]
    prompts = [REPEATED, REPEATED[:20], REPEATED[3:]]
    assert drafted.generate(prompts, drawn) == plain.generate(prompts, drawn)
    assert re.fullmatch("p+g{3,}p+g{3,}.*", "".join(steps)), steps


def test_the_next_turn_begins_on_state_without_rejected_tokens(
    load: Load, drafts: dict[str, str]
) -> None:
    drafted, plain = load(draft=drafts["near"]), load(prefix_cache=False)
    history = [*REPEATED]
    for turn in range(4):
        drawn = Sampling(temperature=1, seed=turn, max_tokens=40, ignore_eos=True)
        (found,), (expected,) = (one.generate([history], drawn) for one in (drafted, plain))
        assert found == expected
        history += [*found.token_ids, 7, 8 + turn]
    figures = drafted._core.speculation
    assert drafted._core.prefix.cached_tokens > len(REPEATED)
    assert figures.drafted_tokens > figures.accepted_tokens > 0


def test_a_cancelled_sequence_with_drafts_leaves_the_others_alone(
    load: Load, drafts: dict[str, str]
) -> None:
    drafted, plain = load(draft=drafts["near"]), load()
    message = {"role": "user", "content": "the red sun"}
    requests = [
        ChatRequest(model="m", messages=[message], temperature=1, seed=seed, max_tokens=40)
        for seed in range(4)
    ]
    sinks = [CollectingSink() for _ in requests]
    running = [drafted.submit(request, sink) for request, sink in zip(requests, sinks, strict=True)]
    for _ in range(3):
        drafted.step()
    running[1].cancel()
    while drafted.step():
        pass
    for index, (request, sink) in enumerate(zip(requests, sinks, strict=True)):
        assert sink.outcome is not None
        expected = plain.chat(request)
        if index == 1:
            cut = sink.outcome.partial
            assert isinstance(cut, ChatCompletion) and (expected.text or "").startswith(
                cut.text or ""
            )
        else:
            assert sink.completion().text == expected.text


def test_figures_of_a_request_are_those_of_its_choices(load: Load, drafts: dict[str, str]) -> None:
    engine = load(draft=drafts["near"])
    message = {"role": "user", "content": "the red sun"}
    request = {"model": "m", "messages": [message], "temperature": 1, "max_tokens": 30, "seed": 1}
    (outcome,) = outcomes(engine, [request | {"n": 3}])
    found = outcome.result
    assert (
        found is not None
        and found.usage is not None
        and found.usage.completion_tokens_details is not None
    )
    details, figures = found.usage.completion_tokens_details, engine._core.speculation
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert accepted == figures.accepted_tokens > 0
    assert rejected == figures.drafted_tokens - figures.accepted_tokens
    assert details.prediction_steps == figures.steps
    each = [one.to_dict() for one in outcome.details]
    for name, total in details.to_dict().items():
        assert sum(one[name] for one in each) == total
    assert len({tuple(one.values()) for one in each}) == 3  # the choices differ
    plain = load().chat({"model": "m", "messages": [message], "max_tokens": 2}).usage
    assert plain is not None and plain.completion_tokens_details is not None
    assert plain.completion_tokens_details.prediction_steps is None
