"""Drafts: their lengths, the n-gram lookup, and their effects in an engine."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.sampling import Sampling
from tests.worker.checkpoints import KINDS, make_checkpoint, make_shallow_checkpoint
from tests.worker.engine.drafted import perturbed
from worker import Engine
from worker.cache.pool import CachePool
from worker.engine.sequence import Sequence
from worker.kernels import library
from worker.kernels.attention import PAGE
from worker.layers.cache import Size
from worker.layers.kv_cache import FullKVCache, WindowKVCache
from worker.layers.recurrent_cache import RecurrentCache
from worker.speculative.acceptance import LONGEST_SEQUENCE_PAUSE, Acceptance
from worker.speculative.ngram import Lookup
from worker.speculative.proposer import Draft

GREEDY = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
LONG = Sampling(temperature=0, max_tokens=60, ignore_eos=True)
PROMPT = [*range(5, 60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "target", num_hidden_layers=2)


def load(folder: Path, **options: Any) -> Engine:
    options = {"device": "cpu", "dtype": "fp32", "max_batch": 2, **options}
    return Engine.load(str(folder), **options)


# --- looking up ---------------------------------------------------------------------------------


def test_what_followed_the_longest_run_is_found() -> None:
    lookup = Lookup()
    assert lookup.following([1, 2, 3], 4) == []
    assert lookup.following([1, 2, 3, 9, 8, 2, 3], 2) == [9, 8]
    # Three tokens go before two, and of equal runs the last one is taken.
    assert lookup.following([1, 2, 3, 9, 8, 2, 3, 5, 1, 2, 3], 1) == [9]
    assert Lookup().following([2, 3, 4, 2, 3, 5, 2, 3], 1) == [5]


def test_a_run_that_repeats_itself_goes_on() -> None:
    assert Lookup().following([7, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


# --- how much -----------------------------------------------------------------------------------


def test_the_length_of_a_draft_follows_what_was_accepted() -> None:
    acceptance = Acceptance()
    assert acceptance.length(4, 0.8) == 4
    for _ in range(3):
        acceptance.add(4, 1)
    shorter = acceptance.length(4, 0.8)
    assert 0 < shorter < 4
    for _ in range(10):
        acceptance.add(4, 4)
    assert acceptance.length(4, 0.8) == 4
    assert (acceptance.steps, acceptance.drafted, acceptance.accepted) == (13, 52, 43)


def test_a_draft_that_is_always_wrong_is_tried_less_and_less() -> None:
    acceptance, tried = Acceptance(), []
    for step in range(2000):
        number = acceptance.length(4, 0.8)
        if number:
            acceptance.add(number, 0)
            tried.append(step)
    pauses = [later - earlier for earlier, later in pairwise(tried[10:])]
    assert pauses == sorted(pauses)
    assert max(pauses) > LONGEST_SEQUENCE_PAUSE // 2
    assert len(tried) < 25


# --- with an engine -----------------------------------------------------------------------------


@pytest.mark.skipif(library.active() is None, reason="without kernels nothing is replayed")
def test_steps_in_which_a_model_draft_computes_two_tokens_are_replayed(tmp_path: Path) -> None:
    """As after a draft that was right to its end."""
    model = make_checkpoint(tmp_path / "model", hidden_size=64, intermediate_size=96)
    plain = load(model, dtype="bf16", max_batch=1)
    drafted = load(model, dtype="bf16", max_batch=1, draft=str(model))
    drafted._core.speculation._costs = None
    assert drafted.generate([PROMPT], LONG) == plain.generate([PROMPT], LONG)
    draft: Any = drafted._core.runner.draft
    forms = [form[-2:] for form in draft.model._replay._steps]
    assert (0, 2) in forms  # no single tokens, and a chunk of two


def test_drafts_have_caches_in_the_pool_and_leave_nothing(folder: Path) -> None:
    near = perturbed(folder, folder.parent / "near")
    plain, drafted = load(folder), load(folder, draft=str(near))
    one = plain._core.book.bytes_for_one(100)
    assert drafted._core.book.bytes_for_one(100) == 2 * one
    assert drafted.generate([PROMPT], GREEDY) == plain.generate([PROMPT], GREEDY)
    drafted._core.trim()
    book = drafted._core.book
    assert book.bytes_held == book.sizes.storage(Size(0, 0, len(book.kept)))
    assert drafted._core.weight_bytes == 2 * plain._core.weight_bytes
    drafted.close()
    assert drafted._core.runner.pool.draft_layers == []


def test_drafts_stop_at_the_context_of_the_draft(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = make_checkpoint(
        folder.parent / "short", num_hidden_layers=1, max_position_embeddings=60
    )
    engine = load(folder, draft=str(short))
    engine._core.speculation._costs = None
    positions = watched(engine._core.runner.draft, "model", monkeypatch)
    assert engine.generate([PROMPT], GREEDY) == load(folder).generate([PROMPT], GREEDY)
    assert len(PROMPT) < max(positions) + 1 <= 60


def watched(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions that a model computes, from now on."""
    seen: list[int] = []
    model = getattr(owner, name)

    class Watched:
        context_length, vocab_size = model.context_length, model.vocab_size

        def __call__(self, batch: Any, caches: Any) -> torch.Tensor:
            seen.extend(batch.positions.tolist())
            logits: torch.Tensor = model(batch, caches)
            return logits

        def draft_tokens(self, batch: Any, caches: Any, count: int, vocab_size: int) -> Any:
            (positions,) = batch.positions.tolist()[-1:]  # of one sequence
            seen.extend(batch.positions.tolist())
            seen.extend(range(positions + 1, positions + count))
            return model.draft_tokens(batch, caches, count, vocab_size)

    monkeypatch.setattr(owner, name, Watched())
    return seen


class Wrong:
    """A proposer that never proposes the tokens of `answers`, which are by prompt."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._answers = answers

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        drafts = []
        for sequence, number in wanted:
            answer = self._answers[tuple(sequence.prompt_ids)]
            drafts.append(Draft([(answer[len(sequence.output_ids)] + 1) % 256] * number))
        return drafts


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_wrong_draft_leaves_may_be_nan(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a token that the model would never compute. Its logits are void, and what it has left
    in the caches is taken back or overwritten before it is read: also by whoever begins with the
    pages that are kept of the sequence."""
    folder = make_shallow_checkpoint(tmp_path / kind, KINDS[kind])
    prompts = [PROMPT, PROMPT[:9]]
    expected = load(folder).generate(prompts, GREEDY)
    stop = GREEDY.model_copy(update={"stop_token_ids": [expected[0].token_ids[6]]})
    stopped = load(folder).generate(prompts, stop)
    longer = [prompt + one.token_ids for prompt, one in zip(prompts, stopped, strict=True)]
    engine = load(folder, draft="ngram")
    core, model = engine._core, engine._core.runner.model
    pairs = zip(prompts, expected, strict=True)
    wrong = Wrong({tuple(prompt): one.token_ids for prompt, one in pairs})
    monkeypatch.setattr(core.speculation, "_proposer", wrong)
    monkeypatch.setattr(core.speculation, "_costs", None)
    spoiled = 0

    def spoiling(batch: Any, caches: Any) -> torch.Tensor:
        nonlocal spoiled
        logits: torch.Tensor = model(batch, caches).clone()
        row = 0
        for one in core._scheduler.scheduled:
            row += 1 + len(one.draft.token_ids)
            if one.draft.token_ids:
                spoiled += 1
                logits[row - len(one.draft.token_ids) : row] = torch.nan
                start = one.sequence.computed + one.tokens
                spoil(core.runner.pool, one.slot, start, start + len(one.draft.token_ids))
        return logits

    monkeypatch.setattr(core.runner, "model", spoiling)
    assert engine.generate(prompts, GREEDY) == expected
    assert engine.generate(prompts, stop) == stopped
    assert spoiled > 9 and core.speculation.accepted_tokens == 0
    monkeypatch.setattr(core.speculation, "_proposer", None)
    before = core.prefix.cached_tokens
    assert engine.generate(longer, GREEDY) == load(folder).generate(longer, GREEDY)
    assert core.prefix.cached_tokens > before


def spoil(pool: CachePool, slot: int, start: int, end: int) -> None:
    """Give a slot NaN in all that the tokens [start, end) have written."""
    for layer in pool.layers:
        if isinstance(layer, RecurrentCache):
            layer.inputs[slot] = layer.state[slot] = torch.nan
        for position in range(start, end):
            if isinstance(layer, WindowKVCache):
                at, column = slot, position % layer.stored().keys.shape[2]
            elif isinstance(layer, FullKVCache):
                (at,) = pool.table.pages(slot, position // PAGE * PAGE, position + 1)
                column = position % PAGE
            else:
                continue
            layer.stored().keys[at, :, column] = layer.stored().values[at, :, column] = torch.nan


def test_a_draft_whose_logits_are_not_finite_is_not_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folder, draft=str(folder))
    draft: Any = engine._core.runner.draft
    engine._core.speculation._costs = None
    model, asked = draft.model, []

    class Poisoned:
        context_length, vocab_size = model.context_length, model.vocab_size

        def __call__(self, batch: Any, caches: Any) -> torch.Tensor:
            asked.append(1)
            logits: torch.Tensor = model(batch, caches)
            return logits * float("nan")

        def draft_tokens(self, batch: Any, caches: Any, count: int, vocab_size: int) -> Any:
            asked.append(1)
            found = model.draft_tokens(batch, caches, count, vocab_size)
            return [(best * float("nan"), chosen) for best, chosen in found]

    monkeypatch.setattr(draft, "model", Poisoned())
    assert engine.generate([PROMPT], GREEDY) == load(folder).generate([PROMPT], GREEDY)
    assert len(asked) == 1


def with_more_tokens(path: Path, more: int) -> tuple[Path, int]:
    """A model whose tokenizer has tokens that `folder`'s has not, and the first id of them."""
    tokenizer = json.loads((make_checkpoint(path) / "tokenizer.json").read_text())
    first = json.loads((path / "config.json").read_text())["vocab_size"]
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": first + index, "content": f"<more_{index}>", "special": False, **entry}
        for index in range(more)
    ]
    make_checkpoint(path, vocab_size=first + more)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path, first


@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_a_sequence_with_a_token_that_the_draft_does_not_have_drafts_no_more(
    folder: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    larger, new = with_more_tokens(tmp_path / "more", 100)
    engine = load(larger, draft=str(folder))
    engine._core.speculation._costs = None
    computed = watched(engine._core.runner.draft, "model", monkeypatch)
    prompt, sampling = [*PROMPT[:20], new + 99, *PROMPT[20:]], GREEDY
    if where == "answer":
        prompt, sampling = PROMPT, Sampling(temperature=1.5, seed=1, max_tokens=40, ignore_eos=True)
    prompts = [prompt, PROMPT[:30]]
    assert engine.generate([prompt], sampling) == load(larger).generate([prompt], sampling)
    found = engine.generate([prompt], sampling)[0].token_ids
    at = next((at for at, token_id in enumerate([*prompt, *found]) if token_id >= new), None)
    assert at is not None and (at < len(prompt)) == (where == "prompt")
    assert max(computed, default=-1) < (0 if where == "prompt" else at + 4)
    # Other sequences go on with the draft, also beside such a one.
    drafted = engine._core.speculation.drafted_tokens
    assert engine.generate(prompts, GREEDY) == load(larger).generate(prompts, GREEDY)
    assert engine._core.speculation.drafted_tokens > drafted


def test_what_drafts_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "worker"):
        load(folder, draft="ngram", draft_tokens=3)
    assert f"drafts for {folder}: ngram, at most 3 tokens" in caplog.messages
