"""Generation with each kind of cache on the device, against the CPU in float32."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.request import ChatRequest
from jobs.api.sampling import Sampling
from jobs.errors import JobError
from tests.gpu.conftest import DEVICE, Load
from tests.worker.checkpoints import KINDS
from tests.worker.engine.drafted import mixed_requests, perturbed
from worker import ChatSession, Engine
from worker import device as devices
from worker.device import BatchLimits
from worker.layers.batch import Batch
from worker.layers.transfer import Reading
from worker.local.collect import CollectingSink

# A window and sinks, and gated delta nets with experts, beside the three kinds.
FAMILIES = {**KINDS, "sinks": "gpt_oss", "experts": "qwen3_next", "caps": "gemma2"}
GREEDY = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
SYSTEM = [5 + i % 90 for i in range(101)]


@pytest.fixture(params=FAMILIES)
def path(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(FAMILIES[request.param])


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of more than 16 tokens take several steps, beside others that decode."""
    small = BatchLimits(max_batch=4, step_tokens=16, stride=64, overlaps=True)
    monkeypatch.setattr(devices, "ACCELERATOR_LIMITS", small)
    monkeypatch.setattr(devices, "CPU_LIMITS", replace(small, overlaps=False))


def tokens(engine: Engine, prompts: list[list[int]], options: Any = GREEDY) -> list[list[int]]:
    return [list(one.token_ids) for one in engine.generate(prompts, options)]


def test_mixed_steps_with_chunks_and_gaps(path: Path, load: Load, small_steps: None) -> None:
    prompts = [[7 + i] * (3 + 17 * i) for i in range(9)]
    options = [GREEDY.model_copy(update={"max_tokens": 2 + 5 * i % 13}) for i in range(9)]
    expected = tokens(load(path, reference=True), prompts, options)
    assert tokens(load(path), prompts, options) == expected


def answers(engine: Engine, requests: list[dict[str, Any]]) -> list[Any]:
    sinks = [CollectingSink() for _ in requests]
    given = zip(requests, sinks, strict=True)
    chats = [engine.submit(ChatRequest.parse(one), sink) for one, sink in given]
    while not all(chat.done for chat in chats):
        engine.step()
    return [sink.completion() for sink in sinks]


def test_sampling_options_in_one_batch(path: Path, load: Load) -> None:
    """Penalties, biases, seeds, truncations, bad words, log-probabilities of answers and prompts,
    tools: the same tokens, and log-probabilities within 1e-3."""
    requests = mixed_requests(24)
    ours, theirs = answers(load(path), requests), answers(load(path, reference=True), requests)
    for one, other in zip(ours, theirs, strict=True):
        assert [choice.message for choice in one.choices] == [c.message for c in other.choices]
        assert [c.finish_reason for c in one.choices] == [c.finish_reason for c in other.choices]
        for mine, its in zip(one.choices, other.choices, strict=True):
            if its.logprobs is not None:
                assert [each.logprob for each in mine.logprobs.content] == pytest.approx(
                    [each.logprob for each in its.logprobs.content], abs=1e-3
                )
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)


FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_constrained_rows_beside_free_ones(path: Path, load: Load, draft: str | None) -> None:
    """Their masks are filled on the host while the device computes."""
    asked = {"model": "m", "enable_thinking": False, "max_tokens": 300, "temperature": 0}
    own: list[dict[str, Any]] = [
        {},
        {"temperature": 1.2},
        {"top_p": 0.6, "temperature": 1},
        {"n": 2},
    ]
    requests = [
        {**asked, "seed": number, **one, "messages": [{"role": "user", "content": f"{number}"}]}
        for number, one in enumerate(own * 3)
    ]
    for request in requests[4:]:
        request["guided_json"] = FORM
    options = {"max_batch": 8, "draft": draft}
    ours, theirs = (
        [
            [(choice.message, choice.finish_reason) for choice in one.choices]
            for one in answers(load(path, reference=reference, **options), requests)
        ]
        for reference in (False, True)
    )
    assert ours == theirs
    for message, reason in (choice for one in ours[4:] for choice in one):
        assert reason == "stop" and set(json.loads(message.content)) == {"name", "tags"}


def test_top_p_beyond_the_candidates(
    checkpoint: Callable[..., Path], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.sampling.sampler.CANDIDATES", 4)
    path, options = checkpoint("qwen3"), Sampling(top_p=0.95, temperature=2.0, seed=3)
    expected = tokens(load(path, reference=True), [[5, 6], [7]], options)
    assert tokens(load(path), [[5, 6], [7]], options) == expected


def test_a_common_prefix_is_computed_once(path: Path, load: Load) -> None:
    prompts = [[*SYSTEM, 101 + i, 7] for i in range(4)]
    without = load(path, prefix_cache=False)
    expected = [tokens(without, [prompt])[0] for prompt in prompts]
    engine = load(path)
    found = [tokens(engine, [prompt])[0] for prompt in prompts]
    assert (found, tokens(engine, prompts)) == (expected, expected)
    assert engine._core.prefix.cached_tokens > 2 * len(SYSTEM)
    assert expected == tokens(load(path, reference=True), prompts)


def test_a_conversation_goes_on_from_its_state(path: Path, load: Load) -> None:
    texts = ["one two three four five", "and the dog", "the answer is"] * 2
    histories = []
    for reference in (False, True):
        engine = load(path, reference=reference)
        session = ChatSession(engine, system="You answer.", temperature=0, max_tokens=8)
        for text in texts:
            session.respond(text)
        histories.append(session.history)
    assert histories[0] == histories[1]


def test_a_prompt_cache_in_a_file(path: Path, load: Load, tmp_path: Path) -> None:
    """Saved on one device, loaded on the other."""
    prompt = [*SYSTEM, 101, 102]
    expected = tokens(load(path, reference=True, prefix_cache=False), [prompt])
    for writer, reader in ((False, False), (False, True), (True, False)):
        file = tmp_path / f"{writer}-{reader}"
        load(path, reference=writer).save_prompt_cache(SYSTEM, file)
        engine = load(path, reference=reader)
        assert engine.load_prompt_cache(file) == len(SYSTEM)
        assert tokens(engine, [prompt]) == expected
        assert engine._core.prefix.cached_tokens == len(SYSTEM)


@pytest.mark.parametrize("draft", ["ngram", "model"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5_text"])
def test_drafts_change_no_token(
    family: str, draft: str, checkpoint: Callable[..., Path], load: Load, tmp_path: Path
) -> None:
    path = checkpoint(family)
    given = "ngram" if draft == "ngram" else str(perturbed(path, tmp_path / "draft"))
    prompts = [[5 + i, 9, 11, 5 + i, 9, 11, 5 + i, 9] * 4 for i in range(3)]
    options = [
        GREEDY.model_copy(update={"max_tokens": 40}),
        Sampling(temperature=0.7, seed=4, max_tokens=30, ignore_eos=True),
        GREEDY.model_copy(update={"max_tokens": 25, "repetition_penalty": 1.1}),
    ]
    expected = tokens(load(path, reference=True), prompts, options)
    engine = load(path, draft=given)
    assert tokens(engine, prompts, options) == expected
    # Greedy answers of the hybrid repeat nothing that could be looked up.
    looked_up = (draft, family) == ("ngram", "qwen3_5_text")
    assert looked_up or engine._core.speculation.accepted_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_decode_steps_are_graphs(kind: str, checkpoint: Callable[..., Path], load: Load) -> None:
    """While sequences end, and while the cache grows beyond its first 256 columns."""
    path = checkpoint(KINDS[kind])
    prompts = [[5 + i] * (3 + 12 * i) for i in range(20)]
    options = [GREEDY.model_copy(update={"max_tokens": 60 - 2 * i}) for i in range(20)]
    plain, engine = load(path, max_batch=20), load(path, max_batch=20)
    models: list[Any] = [one._core.runner.model for one in (plain, engine)]
    graphs = [model._graphs for model in models]
    graphs[0].enabled = False
    expected = tokens(plain, prompts, options)
    assert tokens(engine, prompts, options) == expected
    if DEVICE.startswith("cuda"):
        assert (len(graphs[0]._graphs), graphs[1].enabled) == (0, True)
        assert len(graphs[1]._graphs) > 1


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.7, "top_k": 5}], ids=str)
def test_a_decode_step_waits_once_for_the_device(
    fields: dict[str, Any],
    family: str,
    checkpoint: Callable[..., Path],
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not DEVICE.startswith("cuda"):
        pytest.skip("CUDA tells when it is waited for")
    engine = load(checkpoint(family))
    options = Sampling(**fields, max_tokens=100, ignore_eos=True, logprobs=True, top_logprobs=2)
    streams = [engine.generate_stream([5, 6 + i], options) for i in range(3)]
    for _ in range(8):
        for stream in streams:
            next(stream)
    values, readings = Reading.values, 0

    def counted(reading: Reading) -> list[Any]:
        nonlocal readings
        readings += 1
        return values(reading)

    monkeypatch.setattr(Reading, "values", counted)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps = engine._core.steps
            for _ in range(10):
                engine.step()
            steps = engine._core.steps - steps
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in caught if "synchroniz" in str(one.message)]
    assert (steps, readings) == (10, 10)
    assert len(waits) <= readings, [str(one.message) for one in waits]


def test_values_are_read_before_the_device_has_done_what_it_was_given_since() -> None:
    if not DEVICE.startswith("cuda"):
        pytest.skip("CUDA computes while the host goes on")
    reading = Reading(torch.arange(5, device=DEVICE), torch.tensor([0.5], device=DEVICE))
    later = torch.cuda.Event()
    torch.cuda._sleep(3 * 10**9)
    later.record()
    assert reading.values() == [[0, 1, 2, 3, 4], [0.5]]
    assert not later.query()
    torch.cuda.synchronize()


def overlapped(engine: Engine) -> list[int]:
    """The rows of each step that is launched before the one before it is read, from now on."""
    core: Any = engine._core
    core._pipeline.overlaps = (
        not core.book.sizes.needs_clearing
    )  # also with CHATJOBS_TEST_DEVICE=cpu
    follow, rows = core.runner.follow, []

    def followed(following: Any, token_ids: torch.Tensor) -> torch.Tensor:
        rows.append(len(following.rows))
        logits: torch.Tensor = follow(following, token_ids)
        return logits

    core.runner.follow = followed
    return rows


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES.values())
def test_overlapped_steps_change_no_token(
    family: str, dtype: str, checkpoint: Callable[..., Path], load: Load
) -> None:
    """Greedily, with seeds, truncations, biases and log-probabilities, while sequences end."""
    path = checkpoint(family)
    prompts = [[5 + i] * (3 + 7 * i) for i in range(10)]
    fields: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 4},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 5},
        {"temperature": 0, "logit_bias": {"5": 2.0}},
        {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    ]
    options = [Sampling(**fields[i % 5], max_tokens=40 - 3 * i, ignore_eos=True) for i in range(10)]
    plain = load(path, dtype=dtype, max_batch=10)
    plain._core._pipeline.overlaps = False
    engine = load(path, dtype=dtype, max_batch=10)
    rows = overlapped(engine)
    expected = tokens(plain, prompts, options)
    assert tokens(engine, prompts, options) == expected
    recurrent = engine._core.book.sizes.needs_clearing
    assert len(rows) > 20 if not recurrent else not rows


def test_answers_that_end_in_overlapped_steps(path: Path, load: Load) -> None:
    """By stop tokens, while others wait and go on: the token in flight is void."""
    prompts = [[7 + i] * (3 + 5 * i) for i in range(12)]
    plain = load(path, reference=True)
    whole = tokens(plain, prompts, GREEDY)
    options = [
        GREEDY.model_copy(update={"stop_token_ids": [ids[2 + at % 9]]})
        for at, ids in enumerate(whole)
    ]
    expected = tokens(plain, prompts, options)
    engine = load(path)
    rows = overlapped(engine)
    assert tokens(engine, prompts, options) == expected
    continued = [[*prompt, *ids, 9] for prompt, ids in zip(prompts, expected, strict=True)]
    assert tokens(engine, continued) == tokens(plain, continued)
    assert rows or engine._core.book.sizes.needs_clearing


@pytest.mark.parametrize("where", ["launch", "read"])
def test_a_step_fails_while_one_is_in_flight(
    where: str, checkpoint: Callable[..., Path], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompts = checkpoint("qwen3"), [[5, 6, 7], [8, 9]]
    expected = tokens(load(path, reference=True), prompts)
    engine = load(path)
    rows = overlapped(engine)
    core: Any = engine._core
    failures = 0

    def failing(whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            nonlocal failures
            found = whole(*given)
            if core._pipeline.in_flight is not None and failures < 2:
                failures += 1
                raise RuntimeError("requested by the test")
            return found

        return call

    if where == "launch":
        core.runner.follow = failing(core.runner.follow)
    else:
        monkeypatch.setattr(Reading, "values", failing(Reading.values))
    assert tokens(engine, prompts) == expected
    # After a result that could not be read, sequences run alone, and nothing overlaps.
    assert failures == (2 if where == "launch" else 1) and rows


def test_logits_that_are_not_finite_fail_their_sequence_alone(
    checkpoint: Callable[..., Path], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompts = load(checkpoint("qwen3")), [[5, 6, 7], [8, 9]]
    _, expected = tokens(engine, prompts)
    model: Any = engine._core.runner.model

    def broken(batch: Batch, caches: Any) -> torch.Tensor:
        logits: torch.Tensor = model(batch, caches).clone()
        logits[batch.select_logits_rows(batch.token_ids) == prompts[0][-1]] = float("nan")
        return logits

    monkeypatch.setattr(engine._core.runner, "model", broken)
    for failing in ([prompts[0]], prompts):
        with pytest.raises(JobError, match="not finite after 3 tokens"):
            tokens(engine, failing)
    assert tokens(engine, [prompts[1]]) == [expected]


def test_two_engines_on_one_device(checkpoint: Callable[..., Path], load: Load) -> None:
    """Their steps in turns."""
    paths = [checkpoint("qwen3"), checkpoint("gemma3_text")]
    prompts = [[7] * 20, [8, 9, 10]]
    expected = [tokens(load(path, reference=True), prompts) for path in paths]
    engines = [load(path) for path in paths]
    streams = [engine.generate_stream(prompts[0], GREEDY) for engine in engines]
    found: list[list[int]] = [[], []]
    for pair in zip(*streams, strict=True):
        for which, token in enumerate(pair):
            found[which].append(token.id)
    assert found == [one[0] for one in expected]
    assert [tokens(engine, prompts) for engine in engines] == expected
    assert engines[0].info.device.startswith(DEVICE.split(":")[0])
