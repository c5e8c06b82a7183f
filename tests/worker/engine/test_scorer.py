"""Scoring with a model that counts: which positions are read, in chunks, in a slot of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jobs.errors import JobError
from tests.worker.engine.fakes import CONTEXT, make_caches
from worker.engine.runner import ModelRunner
from worker.engine.scorer import Scorer, token_ids
from worker.layers.batch import Batch
from worker.sampling.prompt_logprobs import CHUNK_TOKENS

VOCAB = 8
SCALE = 0.01  # of the logits: probabilities of all positions can be told apart


class NextNumber:
    """Gives token + 1 (modulo VOCAB) a logit that grows with its position, and all others 0."""

    vocab_size = VOCAB

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad  # the token whose logits are NaN
        self.chunks: list[int] = []  # tokens per forward pass

    def __call__(self, batch: Batch, layers: Any) -> Tensor:
        self.chunks.append(len(batch.token_ids))
        logits = torch.zeros(len(batch.token_ids), VOCAB)
        following = (batch.token_ids + 1) % VOCAB
        logits.scatter_(1, following[:, None], batch.positions.float()[:, None] * SCALE)
        if self.bad is not None:
            logits[batch.token_ids == self.bad] = torch.nan
        return batch.select_logits_rows(logits)


def make_scorer(model: NextNumber, **pool: Any) -> Scorer:
    def not_finite(tokens: int) -> JobError:
        return JobError("internal", f"not finite after {tokens} tokens")

    cpu: Any = torch.device("cpu")
    fake: Any = model
    book, caches = make_caches(**pool)
    return Scorer(ModelRunner(fake, caches, cpu).forward, book, CONTEXT, not_finite)


def numbers(count: int) -> list[int]:
    return [number % VOCAB for number in range(count)]


def log_probability(position: int, expected: bool) -> float:
    """Of a token after the one at `position`."""
    logits = torch.zeros(VOCAB)
    logits[0] = position * SCALE
    return float(logits.log_softmax(0)[0 if expected else 1])


def test_each_target_is_scored_after_the_tokens_before_it() -> None:
    scores = make_scorer(NextNumber()).score([0, 1, 2], [3, 4, 7])
    assert scores == pytest.approx(
        [log_probability(2, True), log_probability(3, True), log_probability(4, False)]
    )


def test_no_target_needs_no_forward_pass() -> None:
    model = NextNumber()
    assert make_scorer(model).score([1], []) == []
    assert model.chunks == []


@pytest.mark.parametrize("prompt", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 600])
def test_chunks_change_nothing(prompt: int) -> None:
    ids = numbers(900)
    model = NextNumber()
    scores = make_scorer(model).score(ids[:prompt], ids[prompt:])
    expected = [log_probability(position, True) for position in range(prompt - 1, 899)]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert sum(model.chunks) == 899
    assert max(model.chunks) == CHUNK_TOKENS


def test_prompt_logits_has_a_row_per_token() -> None:
    logits = make_scorer(NextNumber()).prompt_logits(numbers(CHUNK_TOKENS + 3))
    assert logits.shape == (CHUNK_TOKENS + 3, VOCAB)
    assert torch.equal(logits.max(1).values, torch.arange(CHUNK_TOKENS + 3) * SCALE)


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(JobError, match=f"{CONTEXT + 1} tokens exceed the context") as caught:
        make_scorer(NextNumber()).prompt_logits([1] * (CONTEXT + 1))
    assert caught.value.code == "context_length_exceeded"


def test_a_full_cache_is_an_error_and_the_slot_is_free_again() -> None:
    scorer = make_scorer(NextNumber(), limit=300, slots=1)
    for _ in range(2):  # a slot that stayed in use would fail the second call otherwise
        with pytest.raises(JobError, match="no room for 500 tokens now") as caught:
            scorer.prompt_logits([1] * 500)
        assert caught.value.code == "out_of_memory"
    assert scorer.prompt_logits([1, 2]).shape == (2, VOCAB)


def test_non_finite_logits_are_reported_with_the_tokens_so_far() -> None:
    scorer = make_scorer(NextNumber(bad=5), slots=1)
    with pytest.raises(JobError, match="not finite after 3 tokens"):
        scorer.prompt_logits([1, 5, 2])
    assert scorer.prompt_logits([1, 2]).isfinite().all()


def test_logits_that_are_not_asked_for_may_not_hide_nan() -> None:
    with pytest.raises(JobError, match=f"not finite after {CHUNK_TOKENS} tokens"):
        ids = [1] * (CHUNK_TOKENS - 1) + [5] + [1] * CHUNK_TOKENS
        make_scorer(NextNumber(bad=5)).score(ids, [2])


@pytest.mark.parametrize("values", [[1, "2"], [1.5], [True], None, 7])
def test_what_is_no_list_of_integers_is_refused(values: Any) -> None:
    with pytest.raises(JobError, match="prompt must be token ids: a list of integers"):
        token_ids(values, VOCAB, "prompt")


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_an_id_outside_the_vocabulary_is_refused(bad: int) -> None:
    with pytest.raises(
        JobError, match=f"the vocabulary has {VOCAB} tokens, got id {bad} in prompt"
    ):
        token_ids([0, bad], VOCAB, "prompt")


def test_integers_of_other_libraries_are_token_ids() -> None:
    assert token_ids([torch.tensor(3)], VOCAB, "prompt") == [3]  # type: ignore[list-item]
