"""Tokens that the grammar of an answer forces are computed together, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import ChatRequest
from jobs.api.answer import ChatCompletion
from tests.worker.checkpoints import KINDS, make_checkpoint, make_shallow_checkpoint
from tests.worker.engine.chat_requests import ask
from tests.worker.engine.drafted import mixed_requests, perturbed
from tests.worker.engine.test_speculation import SERVED, WIDE, answer, outcomes
from worker import Engine
from worker.cache.book import CacheBook
from worker.constraints.matcher import Matcher
from worker.engine.engine import EngineCore
from worker.engine.scheduled import ScheduledSequence, Selected
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.speculation import Speculation
from worker.kernels import library
from worker.speculative.draft_costs import DraftCosts

TEXT = "the quick brown fox jumps over the lazy dog"
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 5},
        "delivery_address_country": {"enum": ["red", "green"]},
        "kind": {"const": "an order of the morning"},
    },
    "required": ["customer_name", "delivery_address_country", "kind"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up_the_weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"enum": [1, 22]}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"guided_json": SCHEMA},
    "const": {"guided_json": {"const": {"a": TEXT, "b": [1, 2]}}},
    "regex": {"guided_regex": f"[0-9]{{2}} {TEXT}[a-c]{{2}}"},
    "choice": {"guided_choice": [TEXT + " and sleeps", TEXT + " in the sun"]},
    "lark": {"guided_grammar": f'start: /[a-c]/ "{TEXT}" ("yes" | "no") "{TEXT}"'},
    "tool": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
}
DRAWS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.3, "seed": 7, "n": 2, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "logprobs": True},
]

Load = Callable[..., Engine]


def requests(draws: list[dict[str, Any]] = DRAWS, forms: Any = FORMS) -> list[dict[str, Any]]:
    message = {"role": "user", "content": "hello"}
    plain: dict[str, Any] = {"model": "m", "messages": [message], "max_tokens": 200}
    plain |= {"enable_thinking": False, "return_token_ids": True}
    return [{**plain, **form, **drawn} for form in forms.values() for drawn in draws]


@contextmanager
def nothing_forced() -> Iterator[None]:
    """Each token takes a step of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Matcher, "forced_tokens", lambda *_: ())
        yield


class Watch:
    """The lengths of the drafts of an engine: of forced tokens, and of proposals."""

    def __init__(self, engine: Engine) -> None:
        self.forced: list[int] = []
        self.proposed: list[int] = []
        self.most = 0  # forced tokens of a step
        self._speculation = engine._core.speculation
        self._extend = self._speculation.extend
        self._speculation.extend = self._watched  # type: ignore[method-assign]

    def _watched(self, selected: SequenceOf[Selected]) -> list[ScheduledSequence]:
        found = self._extend(selected)
        forced = [len(one.draft.token_ids) for one in found if one.draft.forced]
        self.forced += forced
        self.most = max(self.most, sum(forced))
        numbers = [len(one.draft.token_ids) for one in found if not one.draft.forced]
        self.proposed += [number for number in numbers if number]
        return found


def load_engine(folder: Path, **options: Any) -> Engine:
    return Engine.load(
        str(folder),
        **{"device": "cpu", "dtype": "fp32", "max_batch": 4, "prefix_cache": False, **options},
    )


@pytest.fixture(scope="module", params=KINDS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "target"
    return make_shallow_checkpoint(path, KINDS[request.param])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "target", num_hidden_layers=1)


@pytest.fixture
def load(folder: Path) -> Load:
    return partial(load_engine, folder)


def same(engine: Engine, asked: list[dict[str, Any]]) -> tuple[int, int]:
    """Check that an engine answers as without forced drafts. Returns the numbers of steps with them
    and without."""
    core = engine._core
    before = core.steps
    found = outcomes(engine, asked)
    between = core.steps
    with nothing_forced():
        expected = outcomes(engine, asked)
    for one, other in zip(found, expected, strict=True):
        (tokens, numbers), (expected_tokens, expected_numbers) = answer(one), answer(other)
        assert tokens == expected_tokens
        assert numbers == pytest.approx(expected_numbers, abs=1e-3)
    assert core.book._used == {}
    return between - before, core.steps - between


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_all_kinds_have_their_answers_in_fewer_steps(load: Load, form: str) -> None:
    engine = load()
    watch = Watch(engine)
    steps, each = same(engine, requests(forms={form: FORMS[form]}))
    assert sum(watch.forced) > 10
    assert steps < each
    engine.close()


def test_layers_of_all_kinds_keep_what_was_accepted(family: Path) -> None:
    """Beside free rows; a window takes no more tokens than it has columns."""
    engine = load_engine(family, prefix_cache=True)
    watch, window = Watch(engine), engine._core.book.sizes.smallest_window
    steps, each = same(engine, [*requests(), *mixed_requests(10, seed=5)])
    assert steps < each
    assert max(watch.forced) == (15 if window is None else window - 1)
    engine.close()


@pytest.mark.skipif(library.active() is None, reason="other products depend on the rows")
@pytest.mark.parametrize("fields", SERVED.values(), ids=SERVED)
def test_one_at_a_time_in_bf16_forced_tokens_change_no_bit(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    """So they are not more than the proposals of the default."""
    model = make_checkpoint(tmp_path / "target", **WIDE, **fields)
    engine = load_engine(model, dtype="bf16", max_batch=1)
    watch = Watch(engine)
    asked = requests()
    found = outcomes(engine, asked)
    with nothing_forced():
        for one, other in zip(found, outcomes(engine, asked), strict=True):
            assert answer(one) == answer(other)
    assert max(watch.forced) == 4
    engine.close()


def test_a_step_has_no_more_forced_tokens_than_memory_for_their_logits(load: Load) -> None:
    engine = load(max_batch=2)
    watch = Watch(engine)
    same(engine, requests([{"temperature": 0, "n": 2}], {"choice": {"guided_choice": [TEXT]}}))
    assert watch.most == 8
    engine.close()


@pytest.mark.parametrize(
    "fields",
    [
        *[{"max_tokens": number} for number in (1, 2, 3, 9)],
        {"stop": ["brown"]},
        {"stop": ["brown"], "include_stop_str_in_output": True},
        {"stop": ["x j", "never"]},
    ],
    ids=str,
)
def test_an_answer_that_ends_among_forced_tokens(load: Load, fields: dict[str, Any]) -> None:
    engine = load()
    steps, each = same(engine, [one | fields for one in requests(DRAWS[1:2])])
    assert steps < each or fields.get("max_tokens", 9) < 3
    engine.close()


def test_a_stop_token_is_legal_where_forced_tokens_end(load: Load) -> None:
    """And where the form may end after proposals."""
    engine = load()
    (stop,) = engine.tokenizer.encode("z")
    form = {"guided_regex": f"{TEXT}[0-9]*"}
    fields = {"stop_token_ids": [stop], "logit_bias": {stop: 100}, "temperature": 0}
    asked = requests([fields], {"form": form})
    steps, each = same(engine, asked)
    assert steps < each
    assert engine.chat(ChatRequest.parse(asked[0])).text == TEXT
    engine.close()


def test_a_forced_token_that_stops_is_none_of_a_draft(load: Load) -> None:
    engine = load()
    ids = engine.tokenizer.encode(TEXT)
    watch = Watch(engine)
    asked = requests([{"stop_token_ids": [ids[6]]}], {"choice": {"guided_choice": [TEXT]}})
    same(engine, asked)
    assert sum(watch.forced) <= 6
    engine.close()


def test_each_token_is_an_event_of_its_own(load: Load) -> None:
    engine = load()
    core = engine._core
    (asked,) = requests([{"temperature": 0}], {"choice": {"guided_choice": [TEXT]}})
    request = ChatRequest.parse(asked)
    prompt = core.prompts.build(request)
    params = core.sampling_params(
        request, prompt.token_ids, core.loaded.constraint(request, prompt)
    )
    events: list[Any] = []
    sequence = engine._sequence(prompt.token_ids, params, 0, events.append)
    core.add([sequence])
    before = core.steps
    while engine.step():
        pass
    assert [event.sampled.token_id for event in events] == sequence.output_ids
    assert core.steps - before < len(events) / 3
    assert "".join(event.text for event in events) == TEXT
    engine.close()


def test_a_rejected_token_is_taken_back(family: Path) -> None:
    """The tokenizer may write the rest of a text in another way: what is drawn decides."""
    engine = load_engine(family)
    forced = Matcher.forced_tokens

    def wrong(matcher: Matcher, most: int) -> Any:
        found = forced(matcher, most)
        return [*found[:-1], found[-1] + 1] if found else found

    watch = Watch(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Matcher, "forced_tokens", wrong)
        found = outcomes(engine, requests())
    assert sum(watch.forced) > 10
    with nothing_forced():
        for one, other in zip(found, outcomes(engine, requests()), strict=True):
            assert answer(one)[0] == answer(other)[0]
    engine.close()


def test_nothing_is_forced_without_room_in_the_cache(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    extend, reserve, full = Speculation.extend, CacheBook.reserve, False

    def extended(*given: Any) -> list[ScheduledSequence]:
        nonlocal full
        full = True
        found = extend(*given)
        full = False
        return found

    monkeypatch.setattr(Speculation, "extend", extended)
    monkeypatch.setattr(CacheBook, "reserve", lambda *given: not full and reserve(*given))
    watch = Watch(engine)
    steps, each = same(engine, requests())
    assert (watch.forced, steps) == ([], each)
    engine.close()


def test_a_preempted_answer_goes_on_with_forced_tokens(load: Load) -> None:
    engine = load()
    core: EngineCore = engine._core
    with nothing_forced():
        expected = outcomes(engine, requests())
    preempted: list[int] = []
    schedule = Scheduler.schedule

    def preempting(self: Scheduler) -> Any:
        newest = self.running[-1] if self.running else None
        if core.steps % 3 == 0 and isinstance(newest, Sequence) and newest.output_ids:
            preempted.append(len(newest.output_ids))
            self._preempt(newest)
        return schedule(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "schedule", preempting)
        found = outcomes(engine, requests())
    assert len(preempted) > 10
    for one, other in zip(found, expected, strict=True):
        assert answer(one)[0] == answer(other)[0]
    engine.close()


# --- beside proposals ---------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["ngram", "near"])
@pytest.mark.parametrize("max_batch", [1, 4])
def test_forced_tokens_are_no_proposals(
    folder: Path, load: Load, draft: str, max_batch: int, tmp_path: Path
) -> None:
    """Neither in the figures of the engine, nor in those of a request."""
    name = draft if draft == "ngram" else str(perturbed(folder, tmp_path / "near"))
    engine = load(draft=name, max_batch=max_batch)
    engine._core.speculation._costs = None  # propose whatever it costs
    watch = Watch(engine)
    asked = [*requests(), *mixed_requests(12, seed=5)]
    found = outcomes(engine, asked)
    figures = engine._core.speculation
    assert figures.drafted_tokens == sum(watch.proposed)
    assert figures.steps == len(watch.proposed)
    assert sum(watch.forced) > 10 and watch.proposed
    usages = [one.result.usage for one in found if isinstance(one.result, ChatCompletion)]
    details = [one.completion_tokens_details for one in usages if one is not None]
    accepted = [one.accepted_prediction_tokens or 0 for one in details if one is not None]
    assert figures.accepted_tokens == sum(accepted)
    with nothing_forced():
        plain = load(max_batch=max_batch)
        for one, other in zip(found, outcomes(plain, asked), strict=True):
            assert answer(one)[0] == answer(other)[0]
    plain.close()
    engine.close()


def test_a_step_with_forced_tokens_is_not_measured(load: Load) -> None:
    """Neither as one without proposals, nor as one with them."""
    engine = load(draft="ngram", max_batch=2)
    costs = DraftCosts()
    engine._core.speculation._costs = costs
    watch, steps, end = Watch(engine), set[tuple[bool, bool]](), costs.end

    def ended(drafted: int, accepted: int) -> None:
        steps.add((bool(watch.forced), costs._measured))
        watch.forced.clear()
        end(drafted, accepted)

    noted: Any = costs
    noted.end = ended
    outcomes(engine, requests(DRAWS[:1], {"regex": FORMS["regex"]}))
    assert steps == {(True, False), (False, False), (False, True)}  # also that of the prompt
    engine.close()


# --- what is forced -----------------------------------------------------------------------------


def matcher_of(engine: Engine, **form: Any) -> Matcher:
    request = ask(**form, enable_thinking=False)
    constraint = engine._core.loaded.constraint(request, engine._core.prompts.build(request))
    assert constraint is not None
    return constraint.matcher(frozenset())


def test_only_the_tokens_of_the_only_text_are_forced(load: Load) -> None:
    engine = load()
    encode = engine.tokenizer.encode
    whole = matcher_of(engine, guided_choice=[TEXT])
    ids = encode(TEXT)
    assert whole.forced_tokens(100) == ids
    assert whole.forced_tokens(3) == ids[:3]
    assert whole.forced_tokens(0) == ()
    whole.advance(ids[:4])
    assert whole.forced_tokens(100) == ids[4:]
    whole.advance(ids[4:])
    assert whole.forced_tokens(100) == ()  # it has ended
    either = matcher_of(engine, guided_choice=[TEXT + " a", TEXT + " b"])
    found = either.forced_tokens(100)
    assert 3 < len(found) < len(ids) + 1 and found[:3] == ids[:3]
    assert not matcher_of(engine, guided_regex="[0-9]+").forced_tokens(100)
    assert not matcher_of(engine, guided_regex="(abc)?").forced_tokens(100)  # it may end
    engine.close()


def test_asking_changes_no_mask(load: Load) -> None:
    engine = load()
    asked, other = (matcher_of(engine, **FORMS["regex"]) for _ in range(2))
    for token_id in engine.tokenizer.encode(f"42 {TEXT}ab"):
        asked.forced_tokens(100)
        assert asked.inner and other.inner
        mask = asked.inner.compute_bitmask()
        assert mask == other.inner.compute_bitmask()
        if forced := asked.forced_tokens(1):
            legal = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
            bits = [byte >> bit & 1 for byte in legal.tolist() for bit in range(8)]
            assert [at for at, bit in enumerate(bits) if bit] == [*forced]
        asked.advance([token_id])
        other.advance([token_id])
    engine.close()
