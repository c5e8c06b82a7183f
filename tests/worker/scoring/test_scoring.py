"""Scores against transformers, on a random model and on the demo model, in float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from jobs.api.score_result import ScoreResult
from jobs.errors import JobError
from tests.worker.checkpoints import make_checkpoint
from tests.worker.engine.chat_requests import ask
from tests.worker.scoring.scores import outcome_of, score, start
from tests.worker.site import ROOT
from worker import Engine
from worker.cache.prefix_store import BLOCK
from worker.engine.sequence import Sequence
from worker.local.collect import CollectingSink

CONTEXT = 256
PROMPT = "The quick brown fox jumps over the lazy dog, and the dog sleeps. Is it five?"
CONTINUATIONS = [" five", " seven times eight", " The answer to the question is 42", "!"]


class Pair(NamedTuple):
    engine: Engine
    reference: Any  # transformers' model


@pytest.fixture(scope="module", params=["random", "demo"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    from transformers import AutoModelForCausalLM

    path = ROOT / "worker/demo/model"
    if request.param == "random":
        path = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")
    reference: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4, context=CONTEXT)
    return Pair(engine, reference.eval())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path: Path = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")
    return Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4, context=CONTEXT)


def expected(reference: Any, ids: list[int], first: int) -> tuple[list[float], bool]:
    """The log-probabilities of the tokens from `first` on, and whether all are the greedy ones."""
    with torch.no_grad():
        logprobs = reference(torch.tensor([ids[:-1]])).logits[0, first - 1 :].log_softmax(-1)
    targets = torch.tensor(ids[first:])
    found = logprobs.gather(1, targets[:, None]).flatten()
    return found.tolist(), bool((logprobs.argmax(-1) == targets).all())


def test_log_likelihoods_are_those_of_transformers(pair: Pair) -> None:
    tokenizer = pair.engine.tokenizer
    context = tokenizer.encode(PROMPT)
    greedy = expected_greedy(pair, context)
    item: Any = {
        "type": "loglikelihood",
        "prompt": PROMPT,
        "continuations": [*CONTINUATIONS, greedy],
    }
    (found,) = score(pair.engine, item)
    assert found.continuations is not None
    for one, result in zip(item["continuations"], found.continuations, strict=True):
        whole = [*context, *one] if one is greedy else tokenizer.encode(PROMPT + one)
        logprobs, is_greedy = expected(pair.reference, whole, len(context))
        assert result.token_ids == whole[len(context) :]
        assert result.token_logprobs == pytest.approx(logprobs, abs=1e-4)
        assert result.logprob_sum == pytest.approx(math.fsum(logprobs), abs=1e-4)
        assert (result.is_greedy, result.tokens) == (is_greedy, len(logprobs))
        assert result.per_token == pytest.approx(result.logprob_sum / len(logprobs))
        if isinstance(one, str):
            assert result.bytes == len(one.encode())
            assert result.per_byte == pytest.approx(result.logprob_sum / len(one.encode()))
    assert [one.is_greedy for one in found.continuations] == [False] * 4 + [True]


def test_the_second_best_token_is_not_greedy(pair: Pair) -> None:
    context = pair.engine.tokenizer.encode(PROMPT)
    with torch.no_grad():
        logits = pair.reference(torch.tensor([context])).logits[0, -1]
    best, second = logits.topk(2).indices.tolist()
    item: Any = {"type": "loglikelihood", "prompt": PROMPT, "continuations": [[best], [second]]}
    (found,) = score(pair.engine, item)
    assert found.continuations is not None
    assert [one.is_greedy for one in found.continuations] == [True, False]


def test_continuations_of_one_token_are_read_from_one_sequence(pair: Pair) -> None:
    context = pair.engine.tokenizer.encode(PROMPT)
    choices: list[Any] = [[token] for token in (5, 7, 5, 11)] + [[9, 8]]
    item: Any = {"type": "choice", "prompt": PROMPT, "choices": choices}
    outcome = outcome_of(pair.engine, item, item)
    assert isinstance(outcome.result, ScoreResult) and outcome.result.usage is not None
    assert outcome.result.usage.prompt_tokens == 2 * (len(context) + len(context) + 1)
    for scored in outcome.result.items:
        assert scored.continuations is not None
        for choice, one in zip(choices, scored.continuations, strict=True):
            logprobs, is_greedy = expected(pair.reference, [*context, *choice], len(context))
            assert one.token_logprobs == pytest.approx(logprobs, abs=1e-4)
            assert (one.token_ids, one.is_greedy) == (choice, is_greedy)


def expected_greedy(pair: Pair, context: list[int]) -> list[int]:
    """Three tokens that the reference would generate."""
    made: list[int] = []
    for _ in range(3):
        with torch.no_grad():
            logits = pair.reference(torch.tensor([context + made])).logits
        made.append(int(logits[0, -1].argmax()))
    return made


def test_a_choice_is_the_best_by_sum_tokens_or_bytes(pair: Pair) -> None:
    tokenizer = pair.engine.tokenizer
    context = tokenizer.encode(PROMPT)
    choices = ["!", " seven times eight is fifty-six", " a a a a a a a a a a a a", " x"]
    sums = [
        math.fsum(expected(pair.reference, tokenizer.encode(PROMPT + one), len(context))[0])
        for one in choices
    ]
    lengths = [len(tokenizer.encode(PROMPT + one)) - len(context) for one in choices]
    divisors = {
        "none": [1] * 4,
        "tokens": lengths,
        "bytes": [len(one.encode()) for one in choices],
    }
    items = [
        {"type": "choice", "prompt": PROMPT, "choices": choices, "normalize": by} for by in divisors
    ]
    spaced = {**items[-1], "delimiter": " "}
    (found,) = score(pair.engine, spaced)
    assert found.continuations is not None
    assert [one.bytes for one in found.continuations] == [len(one.strip()) for one in choices]
    for found, by in zip(score(pair.engine, *items), divisors.values(), strict=True):
        ratios = [value / divisor for value, divisor in zip(sums, by, strict=True)]
        assert found.picked == ratios.index(max(ratios))
        assert found.continuations is not None
        assert [one.logprob_sum for one in found.continuations] == pytest.approx(sums, abs=1e-4)


@pytest.mark.parametrize(
    ("window", "stride", "prefix"),
    [(64, 64, True), (64, 16, False), (None, None, True), (None, None, False), (1, 1, True)],
)
def test_perplexity_in_windows_is_that_of_transformers(
    pair: Pair, window: int | None, stride: int | None, prefix: bool
) -> None:
    """Each token once, after as many tokens as the windows give it."""
    text = "Seven times eight is fifty-six, naïve café. " * (3 if window == 1 else 25)
    ids = pair.engine.tokenizer.encode(text)
    known = pair.engine._core.loaded.prefix_token_id
    assert known is not None and (window == 1 or len(ids) > CONTEXT)
    whole = [known, *ids] if prefix else ids
    wide, step = window or CONTEXT, stride or CONTEXT
    logprobs: list[float] = []
    windows = 0
    while len(logprobs) < len(whole) - 1:  # the next ones, with the widest context before them
        count = min(len(whole) - 1 - len(logprobs), step if windows else wide)
        end = 1 + len(logprobs) + count
        begin = max(0, end - 1 - wide)
        logprobs += expected(pair.reference, whole[begin:end], end - count - begin)[0]
        windows += 1
    (found,) = score(
        pair.engine,
        {"type": "perplexity", "text": text, "window": window, "stride": stride, "prefix": prefix},
    )
    assert found.text is not None
    assert found.text.token_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert found.text.logprob_sum == pytest.approx(math.fsum(logprobs), abs=1e-3)
    assert (found.text.tokens, found.text.windows) == (len(whole) - 1, windows)
    assert found.text.bytes == len(text.encode())
    assert found.text.token_perplexity == pytest.approx(
        math.exp(-math.fsum(logprobs) / len(logprobs)), rel=1e-4
    )
    assert found.text.word_perplexity > found.text.byte_perplexity > 1


def test_continuations_compute_their_prompt_once(engine: Engine) -> None:
    """Four of several tokens on a long prompt: as many tokens as the prompt has, and few more."""
    prompt = [number % 90 for number in range(200)]
    continuations = [[91 + number] * 4 for number in range(4)]
    item = {"type": "loglikelihood", "prompt": prompt, "continuations": continuations}
    outcome = outcome_of(engine, item)
    assert outcome.result is not None and outcome.result.usage is not None
    usage = outcome.result.usage
    assert usage.prompt_tokens_details is not None
    computed = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
    assert computed <= len(prompt) + 4 * (BLOCK + 3)


def test_chats_go_on_while_a_job_is_scored(engine: Engine) -> None:
    expected = engine.chat(ask(temperature=0, max_tokens=12)).text
    sink = CollectingSink()
    chat = engine.submit(ask(temperature=0, max_tokens=12), sink)
    engine.step()
    texts = [[number] * 200 for number in range(6)]
    scoring, _ = start(engine, *({"type": "perplexity", "text": ids} for ids in texts))
    lengths = []
    while not scoring.done:
        engine.step()
        lengths.append(len(chat.sequences[0].output_ids))
    assert len(lengths) > 2
    assert lengths == [min(12, 2 + number) for number in range(len(lengths))]
    while not chat.done:
        engine.step()
    assert sink.completion().text == expected


BAD: list[tuple[Any, str, str]] = [
    ({"type": "foo"}, "invalid_request", "type: must be one of loglikelihood, choice, perplexity"),
    ({}, "invalid_request", "type: must be one of"),
    (7, "invalid_request", "an item must be a JSON object, got 7"),
    ({"type": "choice", "prompt": "a"}, "invalid_request", "'choices' is required"),
    ({"type": "choice", "prompt": "a", "choices": []}, "invalid_request", "choices is empty"),
    (
        {"type": "loglikelihood", "prompt": "a", "continuations": ["b", ""]},
        "invalid_request",
        "number 1 is empty",
    ),
    ({"type": "loglikelihood", "continuations": ["b"]}, "invalid_request", "prompt or messages"),
    (
        {"type": "loglikelihood", "prompt": 5, "continuations": ["b"]},
        "invalid_request",
        "prompt",
    ),
    (
        {"type": "loglikelihood", "prompt": [1, 10**6], "continuations": ["b"]},
        "invalid_request",
        "got id 1000000 in prompt",
    ),
    (
        {"type": "loglikelihood", "prompt": "word " * 900, "continuations": ["b"]},
        "context_length_exceeded",
        f"the context holds {CONTEXT}: shorten the prompt, or set truncate",
    ),
    (
        {"type": "loglikelihood", "prompt": "a", "continuations": ["b"], "foo": 1},
        "invalid_request",
        "unknown field 'foo'",
    ),
    (
        {"type": "perplexity", "text": "a b", "window": CONTEXT + 1},
        "invalid_request",
        f"at most the context of {CONTEXT} tokens",
    ),
    ({"type": "perplexity", "text": "a b", "window": 4, "stride": 5}, "invalid_request", "stride"),
    ({"type": "perplexity", "text": "", "prefix": False}, "invalid_request", "no token to score"),
    ({"type": "perplexity", "text": "\ud800"}, "invalid_request", "lone surrogate"),
]


def test_a_bad_item_fails_alone(engine: Engine) -> None:
    good = {"type": "loglikelihood", "prompt": "a", "continuations": ["b"], "custom_id": "good"}
    items = [item for item, *_ in BAD]
    first, *failed, last = score(engine, good, *items, good)
    for found in (first, last):
        assert (found.error, found.custom_id) == (None, "good")
        assert found.continuations is not None and found.continuations[0].logprob_sum < 0
    for found, (_, code, words) in zip(failed, BAD, strict=True):
        assert isinstance(found.failure, JobError)
        assert (found.failure.code, found.continuations, found.text) == (code, None, None)
        assert words in found.failure.message
    assert engine._core.book._used == {}


def test_a_job_of_bad_items_alone_finishes(engine: Engine) -> None:
    found = score(engine, *(item for item, *_ in BAD))
    assert all(one.failure is not None for one in found)


def test_non_finite_logits_are_the_error_of_their_item(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all items of a job fail so, the job does, and is tried again."""
    model = engine._core.runner.model

    def spoiled(batch: Any, layers: Any) -> torch.Tensor:
        logits = model(batch, layers)
        bad = torch.zeros(len(batch.token_ids), 1)
        for chunk in batch.chunks:
            rows = slice(chunk.row, chunk.row + chunk.length)
            if 7 in batch.token_ids[rows]:
                bad[rows] = torch.nan
        return logits + batch.select_logits_rows(bad)

    monkeypatch.setattr(engine._core.runner, "model", spoiled)
    bad, good = (
        {"type": "loglikelihood", "prompt": [one] * 40, "continuations": [[3, 4], [5]]}
        for one in (7, 8)
    )
    first, second = score(engine, bad, good)
    assert first.failure is not None and first.failure.code == "internal"
    assert second.continuations is not None
    outcome = outcome_of(engine, bad)
    assert outcome.error is not None and outcome.error.retryable
    assert engine._core.book._used == {}


def test_the_other_sequences_of_an_item_that_has_failed_are_cancelled(engine: Engine) -> None:
    prompt = [number % 90 for number in range(200)]
    item: Any = {
        "type": "loglikelihood",
        "prompt": prompt,
        "continuations": [[3, 3], [4, 4], [5, 5]],
    }
    scoring, _ = start(engine, item, item)
    first, *others = scoring.sequences
    first.cancel()
    engine.step()
    assert [one.cancelled for one in others] == [True, True, False, False, False]
    while not scoring.done:
        engine.step()


def test_the_sequences_of_a_failed_item_are_cancelled_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each one that ends would cancel all others again."""
    windows = 200
    text = {"type": "perplexity", "text": [1] * (windows + 1), "window": 1, "prefix": False}
    scoring, _ = start(engine, text)
    cancelled = 0

    def cancel(self: Sequence) -> None:
        nonlocal cancelled
        cancelled += 1
        self.cancelled = True

    monkeypatch.setattr(Sequence, "cancel", cancel)
    scoring.cancel()
    engine.step()
    assert scoring.done
    assert cancelled == 2 * windows  # the request's, and that of its first end


def test_sequences_have_the_priority_of_their_job(engine: Engine) -> None:
    item: Any = {"type": "loglikelihood", "prompt": [1, 2], "continuations": [[3, 3], [4, 4]]}
    for priority, bulk in (("bulk", True), ("interactive", False)):
        scoring, _ = start(engine, item, job={"priority": priority})
        assert [one.bulk for one in scoring.sequences] == [bulk, bulk]
        while not scoring.done:
            engine.step()


def test_what_was_scored_before_a_cancellation_is_kept(engine: Engine) -> None:
    short: Any = {"type": "loglikelihood", "prompt": [1, 2], "continuations": [[3]]}
    long: Any = {"type": "perplexity", "text": [number % 200 for number in range(2000)]}
    scoring, sink = start(engine, short, long, short)
    while not scoring.sequences[0].ended:
        engine.step()
    scoring.cancel()
    while not scoring.done:
        engine.step()
    outcome = sink.outcome
    assert outcome is not None and outcome.error is not None and outcome.result is None
    assert outcome.error.code == "cancelled"
    assert isinstance(outcome.partial, ScoreResult)
    first, second, third = outcome.partial.items
    assert first.continuations is not None and second.text is None
    assert second.failure is not None and second.failure.code == "cancelled"
    assert third.continuations is not None or third.failure is not None
