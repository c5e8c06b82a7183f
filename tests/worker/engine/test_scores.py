"""Scores of given tokens, with a model that counts: which rows are read, in the batch of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jobs.api.sampling import Sampling
from jobs.errors import JobError
from tests.worker.engine.chat_requests import ask
from tests.worker.engine.fakes import FakeSequence, make_caches, selected
from worker import Engine
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence, TokenEvent
from worker.engine.slots import Slots
from worker.layers.batch import Batch
from worker.local.collect import CollectingSink
from worker.sampling.prompt_logits import CHUNK_TOKENS, STEP_TOKENS, PromptLogits, PromptLogprobs

CONTEXT = 1024
VOCAB = 8
SCALE = 0.01  # of the logits: probabilities of all positions can be told apart


class NextNumber:
    """Gives token + 1 (modulo VOCAB) a logit that grows with its position, and all others 0."""

    vocab_size = VOCAB

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad  # the token whose logits are NaN, and those of all tokens after it
        self.chunks: list[int] = []  # tokens per forward pass
        self.rows: list[int] = []  # of the logits that it returns
        self.spoiled: set[int] = set()  # slots

    def __call__(self, batch: Batch, layers: Any) -> Tensor:
        self.chunks.append(len(batch.token_ids))
        logits = torch.zeros(len(batch.token_ids), VOCAB)
        following = (batch.token_ids + 1) % VOCAB
        logits.scatter_(1, following[:, None], batch.positions.float()[:, None] * SCALE)
        for chunk in batch.chunks:
            rows = slice(chunk.row, chunk.row + chunk.length)
            bad = (batch.token_ids[rows] == self.bad).nonzero().flatten().tolist()
            if chunk.start == 0:
                self.spoiled.discard(chunk.slot)
            if chunk.slot in self.spoiled:
                bad = [0]
            if bad:
                logits[rows][bad[0] :] = torch.nan
                self.spoiled.add(chunk.slot)
        found = batch.select_logits_rows(logits)
        self.rows.append(len(found))
        return found


@pytest.fixture
def engine(path: Path) -> Engine:
    return Engine.load(str(path), dtype="fp32", max_batch=4, context=CONTEXT)


@pytest.fixture
def model(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> NextNumber:
    model = NextNumber()
    monkeypatch.setattr(engine._core.runner, "model", model)
    return model


def numbers(count: int) -> list[int]:
    return [number % VOCAB for number in range(count)]


def log_probability(position: int, expected: bool) -> float:
    """Of a token after the one at `position`."""
    logits = torch.zeros(VOCAB)
    logits[0] = position * SCALE
    return float(logits.log_softmax(0)[0 if expected else 1])


def test_each_target_is_scored_after_the_tokens_before_it(
    engine: Engine, model: NextNumber
) -> None:
    assert engine.score([0, 1, 2], [3, 4, 7]) == pytest.approx(
        [log_probability(2, True), log_probability(3, True), log_probability(4, False)]
    )
    assert (model.chunks, model.rows) == ([5], [3])  # the last target is not computed


def test_no_target_needs_no_forward_pass(engine: Engine, model: NextNumber) -> None:
    assert engine.score([1], []) == []
    assert model.chunks == []


@pytest.mark.parametrize("prompt", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 600])
def test_chunks_change_nothing(engine: Engine, model: NextNumber, prompt: int) -> None:
    ids = numbers(900)
    scores = engine.score(ids[:prompt], ids[prompt:])
    expected = [log_probability(position, True) for position in range(prompt - 1, 899)]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert sum(model.chunks) == 899
    assert max(model.rows) == CHUNK_TOKENS


def test_prompt_logits_has_a_row_per_token(engine: Engine, model: NextNumber) -> None:
    logits = engine.prompt_logits(numbers(CHUNK_TOKENS + 3))
    assert logits.shape == (CHUNK_TOKENS + 3, VOCAB)
    assert torch.equal(logits.max(1).values, torch.arange(CHUNK_TOKENS + 3) * SCALE)


def test_more_tokens_than_the_context_are_refused(engine: Engine) -> None:
    for call in (
        lambda: engine.prompt_logits([1] * (CONTEXT + 1)),
        lambda: engine.score([1] * CONTEXT, [1, 2]),
    ):
        with pytest.raises(JobError, match=f"{CONTEXT + 1} tokens exceed the context") as caught:
            call()
        assert caught.value.code == "context_length_exceeded"
    assert len(engine.score([1] * CONTEXT, [1])) == 1


def test_a_full_cache_is_an_error_and_the_slot_is_free_again(path: Path) -> None:
    probe = Engine.load(str(path), dtype="fp32", context=CONTEXT)
    limit = probe._core.book.bytes_for_one(300)
    engine = Engine.load(str(path), dtype="fp32", context=CONTEXT, cache_bytes=limit)
    for _ in range(2):
        with pytest.raises(JobError, match="a sequence of 500 tokens needs") as caught:
            engine.prompt_logits([1] * 500)
        assert caught.value.code == "out_of_memory"
    assert len(engine.prompt_logits([1, 2])) == 2


@pytest.mark.parametrize("targets", [1, 40])
def test_non_finite_logits_fail_their_sequence_alone(
    engine: Engine, model: NextNumber, targets: int
) -> None:
    """Also those of tokens that are not scored; the others compute nothing twice."""
    model.bad = 5
    events: list[TokenEvent] = []
    whole = [1] * 20 + [5] + [1] * CHUNK_TOKENS
    bad = Sequence(
        whole,
        listener=events.append,
        reader=PromptLogprobs(whole, 0, first=len(whole) - targets),
    )
    scores = PromptLogits(300)
    good = Sequence([1] * 300, reader=scores)
    engine._core.add([bad, good])
    while engine.step():
        pass
    error = events[-1].error
    assert error is not None and f"not finite after {len(whole)} tokens" in error.message
    assert torch.cat(scores.rows).isfinite().all()
    assert sum(model.chunks) == len(whole) + 300
    assert engine._core.book._used == {}


def test_a_prompt_that_nothing_is_read_of_is_checked_at_its_end(
    engine: Engine, model: NextNumber
) -> None:
    model.bad = 5
    events: list[TokenEvent] = []
    for ids in ([1] * 40, [5] * 40):
        engine._core.add([Sequence(ids, listener=events.append)])
        while engine.step():
            pass
    good, bad = events
    assert good.finish_reason == "stop" and bad.error is not None
    assert len(engine._core.book.kept) == 2  # two blocks of the good one


def test_others_generate_while_a_long_prompt_is_scored(engine: Engine) -> None:
    expected = engine.chat(ask(temperature=0, max_tokens=12)).text
    sink, events = CollectingSink(), list[TokenEvent]()
    chat = engine.submit(ask(temperature=0, max_tokens=12), sink)
    engine.step()
    scores = PromptLogprobs(numbers(900), 0)
    scored = Sequence(numbers(899), listener=events.append, reader=scores)
    engine._core.add([scored])
    tokens = []
    while not events:
        engine.step()
        tokens.append(len(chat.sequences[0].output_ids))
    assert tokens == [2, 3, 4, 5]  # 899 tokens are four chunks
    while not chat.done:
        engine.step()
    assert sink.completion().text == expected
    assert len(scores.positions) == 899


def test_continuations_of_one_prompt_compute_it_once(engine: Engine) -> None:
    prompt, targets = numbers(320), [[7, 8, 9], [10, 11], [12]]
    plain = Engine.load(
        str(engine.info.reference), dtype="fp32", prefix_cache=False, context=CONTEXT
    )
    expected = [plain.score(prompt, target) for target in targets]
    scores = [PromptLogprobs([*prompt, *one], 0, first=len(prompt)) for one in targets]
    sequences = [
        Sequence([*prompt, *one[:-1]], reader=reader)
        for one, reader in zip(targets, scores, strict=True)
    ]
    engine._core.add(sequences)
    while engine.step():
        pass
    found = [[one[0].logprob for one in reader.positions] for reader in scores]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert [one.cached_tokens for one in sequences] == [0, 304, 304]  # whole blocks before a row


def test_scores_of_generated_tokens_are_their_log_probabilities(engine: Engine) -> None:
    greedy = Sampling(temperature=0, max_tokens=6, ignore_eos=True, logprobs=True)
    (made,) = engine.generate([[5, 6, 7]], greedy)
    assert engine.score([5, 6, 7], made.token_ids) == pytest.approx(made.logprobs, abs=1e-4)


def test_a_step_reads_few_rows_whatever_its_size() -> None:
    """Then sequences wait whose logits are to be read, and the others do not."""
    book, _ = make_caches(slots=33)
    scheduler = Scheduler(book, Slots(32), step_tokens=64 * STEP_TOKENS)
    scored = [Sequence([7] * 600, reader=PromptLogprobs([7] * 601, 0)) for _ in range(8)]
    for one in scored:
        scheduler.add(one)
    for _ in range(2):
        step = selected(scheduler)
        rows = sum(one.reads(count) for one, count in step)
        assert STEP_TOKENS <= rows < STEP_TOKENS + CHUNK_TOKENS
    plain = FakeSequence(50)
    scheduler.running.append(plain)
    plain.slot = book.acquire()
    assert (plain, 50) in selected(scheduler)
