"""Prefix caching through the engine: the state that sequences reuse of each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.answer import ChatCompletion
from jobs.api.request import ChatRequest
from jobs.api.sampling import Sampling
from tests.worker.checkpoints import make_checkpoint
from worker import Engine
from worker import device as devices
from worker.cache import prefix_cache
from worker.cache.prefix_store import BLOCK
from worker.layers.batch import Batch
from worker.layers.cache import Size, pages_for
from worker.local.collect import CollectingSink

SYSTEM = [5 + i % 90 for i in range(100)]
GREEDY = Sampling(temperature=0, max_tokens=6, ignore_eos=True)
EDGE = 96  # the last block edge in SYSTEM

Load = Callable[..., Engine]


@pytest.fixture
def load(folder: Path) -> Load:
    def load(*, dtype: str = "fp32", max_batch: int = 4, **options: Any) -> Engine:
        return Engine.load(str(folder), device="cpu", dtype=dtype, max_batch=max_batch, **options)

    return load


def computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The positions that each forward pass computes, from now on."""
    seen: list[list[int]] = []
    model: Any = engine._core.runner.model

    def watched(batch: Batch, caches: Any) -> torch.Tensor:
        seen.append(batch.positions.tolist())
        logits: torch.Tensor = model(batch, caches)
        return logits

    monkeypatch.setattr(engine._core.runner, "model", watched)
    return seen


def ask(engine: Engine, text: str, **fields: Any) -> ChatCompletion:
    fields = {"temperature": 0, "max_tokens": 4} | fields
    return engine.chat({"model": "m", "messages": [{"role": "user", "content": text}], **fields})


def cached(completion: ChatCompletion) -> int:
    usage = completion.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


def test_a_later_prompt_computes_only_what_is_new(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    engine.generate([SYSTEM + [101] * 30, SYSTEM + [102] * 20], GREEDY)
    plain = load(prefix_cache=False).generate([SYSTEM + [103] * 9], GREEDY)
    seen = computed(engine, monkeypatch)
    assert engine.generate([SYSTEM + [103] * 9], GREEDY) == plain
    assert seen[0] == [*range(EDGE, len(SYSTEM) + 9)][: len(seen[0])]
    assert sum(map(len, seen)) == len(SYSTEM) + 9 - EDGE + 5  # and the answer, but its last token


def test_prompts_that_arrive_together_compute_their_beginning_once(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    prompts = [SYSTEM + [101 + i] * 20 for i in range(4)]
    plain = load(prefix_cache=False).generate(prompts, GREEDY)
    seen = computed(engine, monkeypatch)
    assert engine.generate(prompts, GREEDY) == plain
    flat = [position for positions in seen for position in positions]
    assert flat.count(0) == flat.count(EDGE - 1) == 1
    assert flat.count(EDGE) == 4


def test_a_common_beginning_is_in_memory_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its sequences run, and after them: of each, only what is its own is added."""
    engine = load()
    core, seen = engine._core, []
    engine.generate([SYSTEM], GREEDY)
    model = core.runner.model

    def watched(*given: Any) -> Any:
        seen.append((core.running, core.book._pages.in_slots))
        return model(*given)

    monkeypatch.setattr(core.runner, "model", watched)
    engine.generate([[*SYSTEM, 81 + number] for number in range(4)], GREEDY)
    own = pages_for(len(SYSTEM) + 1 + 6) - EDGE // BLOCK
    assert max(seen) == (4, EDGE // BLOCK + 4 * own)
    assert core.book._pages.used <= EDGE // BLOCK + 5 * own


def test_forks_compute_their_prompt_once(load: Load) -> None:
    engine = load()
    several = GREEDY.model_copy(update={"temperature": 1.0, "n": 4, "seed": 3})
    plain = load(prefix_cache=False).generate([SYSTEM], several)
    assert engine.generate([SYSTEM], several) == plain
    assert engine._core.prefix.cached_tokens == 3 * EDGE


def test_the_next_turn_begins_where_the_answer_ended(load: Load) -> None:
    engine = load()
    (answer,) = engine.generate([SYSTEM], GREEDY)
    known = len(SYSTEM) + 5  # the last token of the answer was not computed
    prompt = [*SYSTEM, *answer.token_ids, 7, 8]
    assert engine.generate([prompt], GREEDY) == load(prefix_cache=False).generate([prompt], GREEDY)
    snapshots = engine._core.prefix._needs_snapshots  # there is one of the very end
    assert engine._core.prefix.cached_tokens == (known if snapshots else known // BLOCK * BLOCK)


@pytest.mark.parametrize(("dtype", "max_batch"), [("fp32", 4), ("fp32", 1), ("bf16", 1)])
def test_the_second_of_three_prompts_reuses_most_of_their_common_beginning(
    load: Load, dtype: str, max_batch: int
) -> None:
    engine, plain = (
        load(dtype=dtype, max_batch=max_batch, prefix_cache=state) for state in (True, False)
    )
    common = SYSTEM * 3  # 300 tokens
    prefix, store = engine._core.prefix, engine._core.book.kept
    reused, provisional = [], []
    for number in range(3):  # one after another
        before, prompt = prefix.cached_tokens, common + [101 + number] * 130
        assert engine.generate([prompt], GREEDY) == plain.generate([prompt], GREEDY)
        reused.append(prefix.cached_tokens - before)
        provisional.append(len(store._provisional))
    exact = 256 if max_batch == 1 else 288  # the last edge in the common beginning
    snapshots = prefix._needs_snapshots
    assert reused == [0, 256 if snapshots else exact, exact]
    count = (3 if max_batch == 1 else 1) if snapshots else 0
    assert provisional == [count, max(0, count - 1), max(0, count - 1)]  # one is used


def test_provisional_snapshots_have_a_share_of_the_bytes(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    prefix, book = engine._core.prefix, engine._core.book
    prefix.spacing = 32
    engine.generate([[9] * 300], GREEDY)
    count = 4 if prefix._needs_snapshots else 0  # after 32, 64, 128 and 256 tokens
    assert len(book.kept._provisional) == count
    if count:
        size = sum(map(book.kept._snapshot_bytes, book.kept._provisional)) // count
        share = book.limit_bytes // (5 * size // 2)  # for two and a half of them
        monkeypatch.setattr(prefix_cache, "PROVISIONAL_SHARE", share)
        engine.generate([[10] * 300], GREEDY)
        assert len(book.kept._provisional) == 2


def test_off_reuses_nothing(load: Load) -> None:
    engine = load(prefix_cache=False)
    for _ in range(2):
        assert cached(ask(engine, "the same question " * 9)) == 0
    assert len(engine._core.book.kept) == 0


def test_salts_separate_state(load: Load) -> None:
    engine = load()
    text = "a question that two tenants have " * 5
    first = [ask(engine, text, cache_salt=salt) for salt in ("a", "b", "a")]
    assert [cached(one) > 0 for one in first] == [False, False, True]
    assert cached(ask(engine, text)) == 0
    assert cached(ask(engine, text)) > 0
    assert len({one.text for one in first}) == 1


def test_scored_prompts_are_computed_whole_and_can_be_reused(load: Load) -> None:
    engine = load()
    text = "a prompt whose tokens are scored " * 9
    first, second = (ask(engine, text, prompt_logprobs=1) for _ in range(2))
    assert cached(first) == cached(second) == 0
    assert first.prompt_logprobs == second.prompt_logprobs
    assert cached(ask(engine, text)) > 0


def test_a_cancelled_sequence_leaves_its_followers_to_compute(load: Load) -> None:
    engine = load(context=400)
    engine._core._scheduler.step_tokens = 32
    text = {"role": "user", "content": "a long prompt, " * 12}
    requests = [ChatRequest(model="m", messages=[text], temperature=0, max_tokens=3)] * 2
    sinks = [CollectingSink() for _ in requests]
    first, second = (
        engine.submit(request, sink) for request, sink in zip(requests, sinks, strict=True)
    )
    engine.step()
    scheduler, prefix = engine._core._scheduler, engine._core.prefix
    assert scheduler.running == first.sequences
    assert prefix.waits(second.sequences[0], scheduler.running)
    first.cancel()
    while not second.done:
        assert engine.step()
    assert (
        sinks[1].completion().text
        == ask(load(prefix_cache=False), text["content"], max_tokens=3).text
    )


def test_a_second_prompt_does_not_wait_when_computing_is_sooner(load: Load) -> None:
    """It begins on kept state beyond what the first, which is computed whole, has computed."""
    engine = load(context=400)
    text = "a long prompt, " * 12
    plain = ask(engine, text)
    message = {"role": "user", "content": text}
    fields: dict[str, Any] = {"model": "m", "messages": [message], "temperature": 0}
    sinks = CollectingSink(), CollectingSink()
    engine.submit(ChatRequest(**fields, prompt_logprobs=1, max_tokens=4), sinks[0])
    engine.submit(ChatRequest(**fields, max_tokens=4), sinks[1])
    engine.step()
    assert len(engine._core._scheduler.running) == 2
    while engine.step():
        pass
    scored, second = (sink.completion() for sink in sinks)
    assert cached(scored) == 0 < cached(second)
    assert scored.text == second.text == plain.text


def test_others_pass_a_sequence_that_waits_but_do_not_take_its_place(load: Load) -> None:
    engine = load(max_batch=3, context=400)
    core = engine._core
    core._scheduler.step_tokens = 64
    prompts = [SYSTEM + [101] * 9, SYSTEM + [102] * 9, [103] * 20, [104] * 20, [105] * 20]
    events: list[Any] = []
    sequences = [
        engine._sequence(prompt, core.sampling_params(GREEDY, prompt), 0, events.append)
        for prompt in prompts
    ]
    core.add(sequences)
    engine.step()
    engine.step()
    assert core._scheduler.running == [sequences[0], sequences[2]]
    while core.waiting > 2:
        engine.step()
    assert core._scheduler.running[:3] == [sequences[0], sequences[2], sequences[1]]
    while engine.step():
        pass


def test_state_of_a_poisoned_sequence_is_dropped(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    core = engine._core
    model: Any = core.runner.model

    def poisoned(batch: Batch, caches: Any) -> torch.Tensor:
        logits: torch.Tensor = model(batch, caches)
        return logits * float("nan")

    monkeypatch.setattr(core.runner, "model", poisoned)
    with pytest.raises(Exception, match="finite"):
        engine.generate([SYSTEM], GREEDY)
    assert len(core.book.kept) == 0


def test_kept_state_gives_way_to_running_sequences(load: Load) -> None:
    plain = load(prefix_cache=False)
    limit = plain._core.book.bytes_for_one(300) * 2
    tight = load(cache_bytes=limit)
    short, long = [[9 + i] * 40 for i in range(30)], [[9 + i] * 290 for i in range(4)]
    for prompt in short:
        assert tight.generate([prompt], GREEDY) == plain.generate([prompt], GREEDY)
    book = tight._core.book
    kept = book.kept.nbytes + book.sizes.storage(Size(0, 0, len(book.kept)))
    assert limit / 3 < kept <= limit
    assert tight.generate(long, GREEDY) == plain.generate(long, GREEDY)
    assert tight._core.book.bytes_held <= limit


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_at_max_batch_1_reuse_changes_no_bit(load: Load, dtype: str) -> None:
    stride = devices.CPU_LIMITS.stride
    prompts = [SYSTEM + [101] * 60, SYSTEM + [102] * 50, SYSTEM + [101] * 60 + [9] * 7, SYSTEM]
    exact = GREEDY.model_copy(update={"logprobs": True, "top_logprobs": 3, "max_tokens": 40})
    engine = load(dtype=dtype, max_batch=1)
    plain = load(dtype=dtype, max_batch=1, prefix_cache=False)
    for prompt in prompts:
        assert engine.generate([prompt], exact) == plain.generate([prompt], exact)
    reused = engine._core.prefix.cached_tokens
    assert reused >= 3 * stride and reused % stride == 0


def test_lengths_that_rotate_differently_share_nothing(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 5e3, "factor": 4.0}
    path = make_checkpoint(
        tmp_path, "llama", head_dim=16, max_position_embeddings=110, rope_scaling=rope
    )
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
    plain = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4, prefix_cache=False)
    reused = []
    for length in (5, 9, 30, 40, 30):  # beyond 110 tokens each length has angles of its own
        before = engine._core.prefix.cached_tokens
        prompt = SYSTEM + [101] * length
        assert engine.generate([prompt], GREEDY) == plain.generate([prompt], GREEDY)
        reused.append(engine._core.prefix.cached_tokens - before)
    assert reused == [0, 96, 0, 0, 128]


def test_a_closed_engine_keeps_nothing(load: Load) -> None:
    engine = load()
    engine.generate([SYSTEM], GREEDY)
    assert len(engine._core.book.kept) > 0
    engine.close()
    assert len(engine._core.book.kept) == 0


def test_prompts_begin_with_kept_state_again_after_others_had_all_of_the_cache(load: Load) -> None:
    """Snapshots have their half again, which long sequences needed."""
    limit = 2 * load()._core.book.bytes_for_one(300)
    engine = load(cache_bytes=limit)
    engine.generate([[5 + i % 50, *range(5, 95), *[i] * 200] for i in range(5, 12)], GREEDY)
    engine.generate([SYSTEM + [101] * 10], GREEDY)
    before = engine._core.prefix.cached_tokens
    engine.generate([SYSTEM + [102] * 10], GREEDY)
    engine.generate([SYSTEM + [103] * 10], GREEDY)
    assert engine._core.prefix.cached_tokens - before >= EDGE
    assert engine._core.bytes_held <= limit
