"""Steps that are launched before the last one is committed, as on GPUs: the same answers, and
nothing of a token that is void is left."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from jobs.api.answer import ChoiceLogprobs
from jobs.api.request import ChatRequest
from jobs.api.sampling import Sampling
from jobs.errors import JobError
from tests.worker.checkpoints import KINDS, make_shallow_checkpoint
from tests.worker.engine.drafted import mixed_requests
from tests.worker.engine.fakes import FakeSequence, advance, commit, make_caches
from tests.worker.engine.test_prefix_property import (
    ACTIONS,
    PRESSURE,
    Ask,
    Cancel,
    Pair,
    Steps,
    run,
)
from worker import Engine
from worker import device as devices
from worker.constraints.masks import MaskedRow, apply_masks
from worker.engine.pipeline import Undrawn
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.slots import Slots
from worker.layers.batch import Batch
from worker.local.collect import CollectingSink
from worker.sampling import inputs
from worker.sampling.sampler import Sampled, StepResult
from worker.speculative.proposer import Draft

GREEDY = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
EXAMPLES = 6
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "tag": {"enum": ["a", "bc"]}},
    "required": ["name", "tag"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["full", "window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shallow_checkpoint(tmp_path_factory.mktemp("model"), KINDS[request.param])


def load(path: Path, *, overlaps: bool = True, **options: Any) -> Engine:
    options = {"dtype": "fp32", "max_batch": 4, "context": 512, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "CPU_LIMITS", replace(devices.CPU_LIMITS, overlaps=overlaps))
        return Engine.load(str(path), device="cpu", **options)


class Watch:
    """Counts the steps of an engine that were launched before the last one was committed."""

    def __init__(self, core: Any) -> None:
        self.launched = 0
        follow = core.runner.follow

        def counted(*given: Any) -> Tensor:
            self.launched += 1
            return follow(*given)

        core.runner.follow = counted


def kept(of_requests: list[Any]) -> list[Any]:
    """Those of the requests that `answers` does not cancel."""
    last = len(of_requests)
    return [one for at, one in enumerate(of_requests, 1) if at % 7 != 3 or at == last]


class Near:
    """Log-probabilities, which are equal to others that differ by the rounding of other batches."""

    def __init__(self, found: ChoiceLogprobs | None) -> None:
        self.tokens = [] if found is None else [one.token for one in found.content or ()]
        self.values = [] if found is None else [one.logprob for one in found.content or ()]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Near)
        return self.tokens == other.tokens and self.values == pytest.approx(other.values, abs=1e-4)


def answers(engine: Engine, requests: list[dict[str, Any]], seed: int) -> list[Any]:
    """The completions of requests that come while others run, some of which are cancelled."""
    chosen, sinks, chats = random.Random(seed), [], []
    for number, one in enumerate(requests):
        sinks.append(CollectingSink())
        chats.append(engine.submit(ChatRequest.parse(one), sinks[-1]))
        if number % 7 == 3:
            chats[-2].cancel()
        for _ in range(chosen.choice([0, 0, 1, 5])):
            engine.step()
    while engine.step():
        pass
    assert all(chat.done for chat in chats)
    found: list[Any] = []
    for sink in kept(sinks):  # how far a cancelled one came depends on the steps
        answer = sink.completion()
        found.append(
            (
                [choice.message for choice in answer.choices],
                [choice.finish_reason for choice in answer.choices],
                [Near(choice.logprobs) for choice in answer.choices],
                answer.prompt_logprobs,
                answer.usage.completion_tokens,
            )
        )
    return found


def test_answers_with_all_options_are_those_without_overlap(folder: Path) -> None:
    """Penalties, biases, bad words and stop strings, log-probabilities, arrivals and cancels."""
    requests = mixed_requests(80)
    plain, engine = load(folder, overlaps=False), load(folder)
    watches = [Watch(one._core) for one in (plain, engine)]
    assert answers(engine, requests, 1) == answers(plain, requests, 1)
    assert watches[0].launched == 0
    assert watches[1].launched > 20
    assert engine._core.book._used == {}


def test_draws_that_need_the_token_before_are_those_without_overlap(folder: Path) -> None:
    """Masks and penalties, beside rows that need nothing. Their forward passes overlap."""
    forms: list[dict[str, Any]] = [
        {"guided_json": SCHEMA, "max_tokens": 200},
        {"repetition_penalty": 1.3},
        {"guided_json": SCHEMA, "max_tokens": 200, "presence_penalty": 1.0, "logprobs": True},
        {},
        {"min_tokens": 8, "bad_words": ["the"]},
    ]
    requests = [
        {
            **{"model": "m", "enable_thinking": False, "seed": number, "max_tokens": 20},
            **forms[number % len(forms)],
            "messages": [{"role": "user", "content": f"hello {number}"}],
        }
        for number in range(30)
    ]
    plain, engine = load(folder, overlaps=False), load(folder)
    watches = [Watch(one._core) for one in (plain, engine)]
    found = answers(engine, requests, 1)
    assert found == answers(plain, requests, 1)
    assert watches[0].launched == 0
    assert watches[1].launched > engine._core.steps / 2
    formed = [
        one for one, request in zip(found, kept(requests), strict=True) if "guided_json" in request
    ]
    for (message, *_), reasons, *_ in formed:
        assert reasons == ["stop"] and set(json.loads(message.content)) == {"name", "tag"}
    assert formed


def test_the_grammar_of_an_answer_that_has_ended_is_not_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def masks(logits: Tensor, rows: list[MaskedRow]) -> None:
        asked.append(len(rows))
        assert not any(one.matcher.inner and one.matcher.inner.is_stopped() for one in rows)
        apply_masks(logits, rows)

    monkeypatch.setattr(inputs, "apply_masks", masks)
    engine = load(folder)
    fields = {"model": "m", "enable_thinking": False, "messages": [{"role": "user", "content": ""}]}
    sinks = [CollectingSink(), CollectingSink()]
    for sink, choice in zip(sinks, ["a", "a long answer"], strict=True):
        engine.submit(ChatRequest.parse({**fields, "guided_choice": [choice]}), sink)
    while engine.step():
        pass
    found = [sink.completion().choices[0].message.content for sink in sinks]
    assert found == ["a", "a long answer"] and asked


def test_a_step_waits_for_forced_tokens_if_they_are_worth_it(folder: Path) -> None:
    """It is neither launched early nor replayed: alone for a text of some tokens, beside others for
    as many times more. Rows without a form overlap as always."""
    engine, plain = load(folder), load(folder, overlaps=False)
    text = "the quick brown fox jumps over the lazy dog"
    ask: dict[str, Any] = {"model": "m", "enable_thinking": False, "temperature": 0}
    ask |= {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}
    long, short = (
        {"guided_regex": f"[0-9]{{6}} {text}"},
        {"guided_regex": "[0-9]{9} the fox [0-9]{9}"},
    )
    free: dict[str, Any] = {"ignore_eos": True}
    watch, steps, launched = Watch(engine._core), [engine._core.steps], [0]
    forced: list[bool] = []
    extend = engine._core.speculation.extend

    def watched(selected: list[Any]) -> Any:
        found = extend(selected)
        forced.append(any(one.draft.forced for one in found))
        return found

    speculation: Any = engine._core.speculation
    speculation.extend = watched
    drafted = []
    for requests in ([long], [short, free, free, free], [free, free]):
        asked = [ask | one for one in requests]
        assert answers(engine, asked, 1) == answers(plain, asked, 1)
        steps.append(engine._core.steps)
        launched.append(watch.launched)
        drafted.append(any(forced))
        forced.clear()
    alone, beside, without = (end - begin for begin, end in pairwise(steps))
    early = [end - begin for begin, end in pairwise(launched)]
    assert drafted == [True, False, False]
    assert alone < len(engine.tokenizer.encode(text)) and early[0] <= 8
    assert early[1] > beside * 0.8
    assert early[2] > without * 0.8


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    pair = Pair(folder)
    pair.core._pipeline.overlaps = True
    return pair


@settings(max_examples=EXAMPLES)
@given(actions=ACTIONS)
@example(actions=PRESSURE)
def test_reuse_and_small_caches_change_no_token(
    pair: Pair, actions: list[Ask | Cancel | Steps]
) -> None:
    run(pair, actions)


def test_a_conversation_and_prompts_that_begin_alike_reuse_the_right_state(folder: Path) -> None:
    """What an answer ends with is kept without the token that was computed after its end."""
    plain, engine = load(folder, overlaps=False, prefix_cache=False), load(folder)
    watch = Watch(engine._core)
    chosen, prompt = random.Random(3), [5 + i % 40 for i in range(40)]
    for turn in range(12):
        options = GREEDY.model_copy(update={"max_tokens": 2 + chosen.randrange(30)})
        (expected,) = plain.generate([prompt], options)
        stop = expected.token_ids[chosen.randrange(len(expected.token_ids))]
        stopping = options.model_copy(update={"stop_token_ids": [stop]})
        others = [[9, turn], [7]]
        found, *_ = engine.generate([prompt, *others], [stopping, options, options])
        (expected,) = plain.generate([prompt], stopping)
        assert found.token_ids == expected.token_ids, turn
        prompt = [*prompt, *found.token_ids, 60 + turn]
    assert watch.launched > 20
    assert engine._core.prefix.cached_tokens > 12 * 40


def test_one_step_is_in_flight_between_two_calls_and_each_commits_one(folder: Path) -> None:
    engine = load(folder)
    core: Any = engine._core
    sequence = started(engine, [5, 6], GREEDY)
    lengths = []
    while not sequence.ended:
        engine.step()
        lengths.append(len(sequence.output_ids))
    assert lengths == [*range(1, 13)]
    assert core.steps == 12  # none is computed beyond max_tokens
    assert core._pipeline.in_flight is None and not engine.step()


def started(engine: Engine, prompt: list[int], options: Sampling) -> Sequence:
    core: Any = engine._core
    params = core.sampling_params(options, prompt)
    sequence = Sequence(prompt, params, 0, None, lambda event: None)
    core.add([sequence])
    return sequence


def test_an_engine_that_nobody_has_is_freed_at_once(folder: Path) -> None:
    """The step in flight belongs to no circle of references, which the collector would free."""
    engine = load(folder)
    engine.generate([[5, 6]], GREEDY)
    core = weakref.ref(engine._core)
    gc.disable()
    try:
        del engine
        assert core() is None
    finally:
        gc.enable()


def test_a_recurrent_state_is_never_a_token_ahead(tmp_path: Path) -> None:
    engine = load(make_shallow_checkpoint(tmp_path / "model", KINDS["recurrent"]))
    watch = Watch(engine._core)
    engine.generate([[5, 6, 7]], GREEDY)
    assert watch.launched == 0


def test_the_cpu_does_not_overlap_and_accelerators_do() -> None:
    assert not devices.limits(torch.device("cpu")).overlaps
    assert devices.limits(torch.device("cuda")).overlaps


@pytest.mark.parametrize("last", [False, True], ids=["others go on", "alone"])
def test_a_void_token_changes_no_later_answer(folder: Path, last: bool) -> None:
    """The step in flight computes the token that ends an answer, whose embedding is not finite."""
    engine = load(folder, prefix_cache=False)
    core: Any = engine._core
    (alone,) = engine.generate([[5, 6, 7]], GREEDY)
    end = alone.token_ids[3]
    first = alone.token_ids.index(end)
    model: Any = core.runner.model
    void = []

    def broken(batch: Batch, caches: Any) -> Tensor:
        logits: Tensor = model(batch, caches).clone()
        for row in (batch.token_ids == end).nonzero().flatten().tolist():
            void.append(row)
            logits[row] = float("nan")
            assert batch.decode is not None
            slot, position = int(batch.decode.slots[row]), int(batch.decode.positions[row])
            for cache in caches:
                views = cache.views(slot, position, position + 1)
                views[0][:, -1:].fill_(float("nan"))
        return logits

    core.runner.model = broken
    other = None if last else started(engine, [40, 41], GREEDY)
    ending = started(engine, [5, 6, 7], GREEDY.model_copy(update={"stop_token_ids": [end]}))
    while engine.step():
        pass
    assert ending.output_ids == alone.token_ids[: first + 1] and void
    core.runner.model = model
    if other is not None:
        assert other.output_ids == engine.generate([[40, 41]], GREEDY)[0].token_ids
    (again,) = engine.generate([[5, 6, 7]], GREEDY)  # what is left in its pages is not read
    assert again.token_ids == alone.token_ids


def test_a_cancelled_sequence_does_not_get_the_token_in_flight(folder: Path) -> None:
    engine = load(folder)
    kept, gone = started(engine, [5, 6], GREEDY), started(engine, [7, 8], GREEDY)
    for _ in range(4):
        engine.step()
    assert engine._core._pipeline.in_flight is not None
    gone.cancel()
    while engine.step():
        pass
    assert (len(gone.output_ids), len(kept.output_ids)) == (4, 12)
    (expected,) = load(folder, overlaps=False).generate([[5, 6]], GREEDY)
    assert kept.output_ids == expected.token_ids


def test_a_launch_that_fails_changes_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load(folder)
    core: Any = engine._core
    follow, calls = core.runner.follow, 0

    def failing(*given: Any) -> Tensor:
        nonlocal calls
        calls += 1
        logits = follow(*given)
        if calls % 2:
            raise MemoryError("no memory\nfor it")
        return logits

    core.runner.follow = failing
    prompts = [[5, 6], [7, 8]]
    found = engine.generate(prompts, GREEDY)
    expected = load(folder, overlaps=False).generate(prompts, GREEDY)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert calls > 4
    assert "a step waits for the one before it: no memory" in caplog.text
    assert core._scheduler.isolated == []


def test_a_step_that_fails_while_one_is_in_flight_fails_no_other(folder: Path) -> None:
    """Its result can't be read. All are computed again, one at a time."""
    engine = load(folder)
    core: Any = engine._core
    draw, armed = core.runner.draw, False

    def drawing(*given: Any) -> Any:
        nonlocal armed
        result = draw(*given)
        if not armed or core._pipeline.in_flight is None:
            return result
        armed = False
        return replace(result, drawn=Unreadable(result.token_ids))

    core.runner.draw = drawing
    sequences = [started(engine, [5, 6], GREEDY), started(engine, [7, 8], GREEDY)]
    for _ in range(3):
        engine.step()
    armed = True
    engine.step()
    assert core._pipeline.in_flight is not None
    engine.step()
    assert core._pipeline.in_flight is None and len(core._scheduler.isolated) == 2
    while engine.step():
        pass
    expected = load(folder, overlaps=False).generate([[5, 6], [7, 8]], GREEDY)
    assert [one.output_ids for one in sequences] == [one.token_ids for one in expected]


class Unreadable:
    def __init__(self, token_ids: Tensor) -> None:
        self.token_ids = token_ids

    def read(self) -> list[Sampled]:
        raise RuntimeError("the device has failed")


def test_logits_that_are_not_finite_fail_their_sequence_alone(folder: Path) -> None:
    engine = load(folder)
    core: Any = engine._core
    (expected,) = engine.generate([[40, 41]], GREEDY)
    model: Any = core.runner.model

    def broken(batch: Batch, caches: Any) -> Tensor:
        logits: Tensor = model(batch, caches).clone()
        bad = (batch.positions == 6) & (batch.prompt_lengths == 3)
        logits[batch.select_logits_rows(bad)] = float("nan")
        return logits

    core.runner.model = broken
    events: list[Any] = []
    params = core.sampling_params(GREEDY, [5, 6, 7])
    bad = Sequence([5, 6, 7], params, 0, None, events.append)
    core.add([bad])
    good = started(engine, [40, 41], GREEDY)
    while engine.step():
        pass
    assert "not finite after 7 tokens" in str(events[-1].error) and len(bad.output_ids) == 4
    assert good.output_ids == expected.token_ids


@pytest.mark.parametrize("between", ["trim", "evict", "changing", "reset", "close"])
def test_what_comes_between_two_steps_meets_a_step_in_flight(folder: Path, between: str) -> None:
    engine = load(folder)
    core: Any = engine._core
    prompt = [5 + i for i in range(20)]
    (expected,) = engine.generate([prompt], GREEDY)
    sequence = started(engine, prompt, GREEDY)
    for _ in range(4):
        engine.step()
    assert core._pipeline.in_flight is not None
    if between == "close":
        engine.close()
        assert core._pipeline.in_flight is None and sequence.ended and len(sequence.output_ids) == 4
        return
    if between == "reset":
        with pytest.raises(KeyboardInterrupt), core.changing():
            raise KeyboardInterrupt
    elif between == "changing":
        with pytest.raises(JobError), core.changing():
            raise JobError("invalid_request", "of no importance")
    elif between == "evict":
        assert core.evict(1 << 30) > 0
    else:
        core.trim()
    while engine.step():
        pass
    assert sequence.output_ids == expected.token_ids


def test_the_storage_is_freed_while_the_last_step_is_void(folder: Path) -> None:
    engine = load(folder, prefix_cache=False)
    core: Any = engine._core
    drawn = Sampling(temperature=1, seed=4, max_tokens=12, ignore_eos=True)
    (alone,) = engine.generate([[5, 6]], drawn)
    later = next(one for one in alone.token_ids[2:] if one not in alone.token_ids[:2])
    engine.generate([[5, 6]], drawn.model_copy(update={"stop_token_ids": [later]}))
    assert core._pipeline.in_flight is not None and core.running == 0
    core.trim()
    assert core.book.bytes_held == 0
    assert engine.step() and not engine.step()
    assert engine.generate([[5, 6]], drawn)[0].token_ids == alone.token_ids


# Which steps are launched early.


def decoding(
    *lengths: int, limit: int = 1 << 30, max_batch: int = 3, **options: Any
) -> tuple[Scheduler, list[FakeSequence]]:
    """A scheduler whose sequences have their first token; its next step is planned."""
    book, _ = make_caches(limit, slots=max_batch + 1)
    scheduler = Scheduler(book, Slots(max_batch), 1000)
    sequences = [FakeSequence(length, **{"max_tokens": 50, **options}) for length in lengths]
    for sequence in sequences:
        scheduler.add(sequence)
    advance(scheduler)
    scheduler.schedule()
    return scheduler, sequences


def test_a_decode_step_is_followed_by_the_same_rows_one_position_later() -> None:
    scheduler, _ = decoding(10, 20)
    before = scheduler.scheduled
    following = scheduler.follow(before)
    assert following is not None
    assert following == ((0, 1), 0, 2, 22)
    assert [row.position for row in scheduler.sampling(ahead=1).rows] == [2, 2]
    scheduler.commit(before, StepResult([Sampled(5, True)] * 2))
    assert scheduler.follow(scheduler.scheduled) == ((0, 1), 0, 2, 23)


def test_a_sequence_that_ends_by_its_length_is_left_out() -> None:
    scheduler, (first, second) = decoding(10, 20)
    second.sampling.params = replace(second.sampling.params, max_tokens=2)
    assert scheduler.follow(scheduler.scheduled) == ((0,), 0, 1, 12)
    assert [one.sequence for one in scheduler.scheduled] == [first]
    scheduler, _ = decoding(10, max_tokens=2)
    assert scheduler.follow(scheduler.scheduled) is None


def test_tokens_of_ended_sequences_are_void() -> None:
    scheduler, (first, second) = decoding(10, 20)
    before = scheduler.scheduled
    assert scheduler.follow(before) is not None
    after = scheduler.scheduled
    scheduler.commit(before, StepResult([Sampled(2, True), Sampled(5, True)]))  # 2 ends an answer
    assert first.ended and first.slot is None
    assert scheduler.follow(after) == ((1,), 1, 2, 23)
    scheduler.commit(after, StepResult([Sampled(9, True), Sampled(6, True)]))
    assert (first.output_ids, second.output_ids) == ([5, 2], [5, 5, 6])
    assert (second.computed, second.pending) == (22, 1)


def test_a_step_of_a_prompt_is_not_followed() -> None:
    scheduler, _ = decoding(10)
    late = FakeSequence(30, max_tokens=50)
    scheduler.add(late)
    assert scheduler.follow(scheduler.scheduled) is None  # it can be admitted
    commit(scheduler)
    scheduler.schedule()
    assert scheduler.follow(scheduler.scheduled) is None  # it computes its prompt
    commit(scheduler)
    scheduler.schedule()
    assert scheduler.follow(scheduler.scheduled) is not None


def test_what_waits_without_a_place_prevents_nothing_until_there_may_be_one() -> None:
    scheduler, sequences = decoding(10, 20, 30, 40)
    assert len(scheduler.waiting) == 1
    before = scheduler.scheduled
    assert scheduler.follow(before) is not None
    after = scheduler.scheduled
    scheduler.commit(before, StepResult([Sampled(2, True), *[Sampled(5, True)] * 2]))
    assert scheduler.follow(after) is None  # a place is free
    scheduler.commit(after, StepResult([Sampled(5, True)] * 3))
    assert [one.sequence for one in scheduled_after(scheduler)].count(sequences[3]) == 1


def scheduled_after(scheduler: Scheduler) -> Any:
    scheduler.schedule()
    return scheduler.scheduled


def test_one_that_ends_by_its_length_leaves_its_place_to_what_waits() -> None:
    scheduler, (first, *_) = decoding(10, 20, 30, 40)
    first.sampling.params = replace(first.sampling.params, max_tokens=2)
    assert scheduler.follow(scheduler.scheduled) is None


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"min_tokens": 5},
    ],
    ids=str,
)
def test_a_draw_that_depends_on_the_last_token_waits_for_it(
    folder: Path, options: dict[str, Any]
) -> None:
    """And its forward pass does not."""
    engine = load(folder)
    core: Any = engine._core
    started(engine, [5, 6], GREEDY.model_copy(update=options))
    engine.step()  # of the prompt
    engine.step()
    assert isinstance(core._pipeline.in_flight, Undrawn)


@pytest.mark.parametrize(
    "options", [{"logit_bias": {"5": 1.0}}, {"allowed_token_ids": [5, 6]}, {"logprobs": True}]
)
def test_other_options_are(options: dict[str, Any]) -> None:
    scheduler, _ = decoding(10, **options)
    assert scheduler.follow(scheduler.scheduled) is not None


def test_pages_that_are_not_allocated_are_not_used() -> None:
    for length, pages in ((30, 2), (31, 3), (254, 16)):
        scheduler, _ = decoding(length)
        assert scheduler.follow(scheduler.scheduled) == ((0,), 0, 1, length + 2)
        pool: Any = scheduler.book.pool  # type: ignore[attr-defined]
        assert len(pool.table.pages(0, 0, 512)) == pages
    scheduler, _ = decoding(255)  # no slot can have more columns yet
    assert scheduler.follow(scheduler.scheduled) is None
    scheduler, _ = decoding(30, limit=64)
    other = scheduler.book.acquire()
    assert other is not None and scheduler.book.reserve(other, 32)  # the last free pages
    assert scheduler.follow(scheduler.scheduled) == ((0,), 0, 1, 32)
    commit(scheduler)
    scheduler.running[0].computed = 31
    assert scheduler.follow([*scheduled_after(scheduler)]) is None


Prepare = Callable[[Scheduler], None]


def isolate(scheduler: Scheduler) -> None:
    scheduler.isolated = [*scheduler.running]


def leave_out(scheduler: Scheduler) -> None:
    scheduler.running.append(FakeSequence(3))


def draft(scheduler: Scheduler) -> None:
    (one,) = scheduler.scheduled
    of = type(one).of
    scheduler.scheduled = [of(one.sequence, one.tokens, Draft([5]))]


def drafts(scheduler: Scheduler) -> None:
    scheduler._speculation.drafts = True


@pytest.mark.parametrize("prepare", [isolate, leave_out, draft, drafts])
def test_a_step_is_not_followed(prepare: Prepare) -> None:
    scheduler, _ = decoding(10)
    prepare(scheduler)
    assert scheduler.follow(scheduler.scheduled) is None
