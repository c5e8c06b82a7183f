"""Constrained output in an engine: with all sampling options, drafts, other rows and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs import ChatRequest, JobError
from jobs.api.answer import ChatCompletion
from tests.worker.checkpoints import make_checkpoint
from tests.worker.engine.chat_requests import WaitingSink
from tests.worker.engine.chat_requests import ask as ask_plainly
from worker import Engine
from worker.engine.scheduled import ScheduledSequence
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.speculation import Speculation
from worker.sampling.inputs import SamplingInput
from worker.speculative.ngram import Lookup

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
FORM: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    "max_tokens": 400,
}


def ask(text: str = "hello", **fields: Any) -> ChatRequest:
    """A model with random weights would never end its thinking."""
    return ask_plainly(text, **{"enable_thinking": False, **fields})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(str(folder), device="cpu", max_batch=8)


def valid(completion: ChatCompletion) -> list[str]:
    """The texts of a completion, each of which ended by itself and is valid."""
    texts = []
    for choice in completion.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content or "")
        assert list(value) == ["name", "tags"]
        assert isinstance(value["name"], str) and len(value["name"]) <= 5
        assert 1 <= len(value["tags"]) <= 3 and {*value["tags"]} <= {"a", "bc"}
        texts.append(choice.message.content or "")
    return texts


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 1},
        {"n": 3, "seed": 2},
        {"top_k": 5, "seed": 3},
        {"top_p": 0.5, "min_p": 0.1, "seed": 4},
        {"repetition_penalty": 1.3, "presence_penalty": 1, "frequency_penalty": 1, "seed": 5},
        {"logit_bias": {7: 10.0}, "seed": 6},
        {"bad_words": ["the"], "seed": 7},
        {"logprobs": True, "top_logprobs": 2, "seed": 8},
        {"min_tokens": 300, "seed": 9},
    ],
    ids=str,
)
def test_an_answer_is_valid_with_each_sampling_option(
    engine: Engine, fields: dict[str, Any]
) -> None:
    texts = valid(engine.chat(ask(**FORM, **fields)))
    assert texts == valid(engine.chat(ask(**FORM, **fields)))  # a seed stays a seed


def test_log_probabilities_are_those_before_the_mask(engine: Engine) -> None:
    one = engine.chat(ask(**FORM, temperature=0, logprobs=True, top_logprobs=3))
    free = engine.chat(ask(max_tokens=1, temperature=0, logprobs=True, top_logprobs=3))
    first, unmasked = one.choices[0].logprobs, free.choices[0].logprobs
    assert first and unmasked and first.content and unmasked.content
    assert [top.token for top in first.content[0].top_logprobs] == [
        top.token for top in unmasked.content[0].top_logprobs
    ]
    assert first.content[0].logprob < unmasked.content[0].logprob


def test_a_stop_string_ends_a_constrained_answer(engine: Engine) -> None:
    (choice,) = engine.chat(ask(**FORM, temperature=0, stop=['"tags"'])).choices
    assert choice.finish_reason == "stop"
    assert (choice.message.content or "").startswith("{") and '"tags"' not in (
        choice.message.content or ""
    )


def test_an_answer_that_max_tokens_cuts_says_so(engine: Engine) -> None:
    (choice,) = engine.chat(ask(**{**FORM, "max_tokens": 3}, temperature=0)).choices
    assert choice.finish_reason == "length"


def test_an_answer_ends_with_its_form_without_an_end_token(engine: Engine) -> None:
    """So min_tokens can't leave a row without a token."""
    completion = engine.chat(ask(guided_choice=["yes"], min_tokens=100, max_tokens=200))
    (choice,) = completion.choices
    assert (choice.message.content, choice.finish_reason) == ("yes", "stop")


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({"response_format": {"type": "json_object"}, "max_tokens": 5}, "{"),
        ({"guided_regex": "[0-9]{3}-[0-9]{2}"}, "0123456789-"),
        ({"guided_grammar": 'root ::= "x" | "y" root'}, "xy"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yesno"),
    ],
    ids=str,
)
def test_each_form_constrains(engine: Engine, fields: dict[str, Any], accepted: str) -> None:
    (choice,) = engine.chat(ask(**fields, seed=1)).choices
    text = choice.message.content or ""
    assert text and text[0] in accepted
    if "max_tokens" not in fields:
        assert choice.finish_reason == "stop" and {*text} <= {*accepted}


def test_rows_without_a_form_are_what_they_are_alone(engine: Engine) -> None:
    free = ask("how are you", max_tokens=12, temperature=0)
    alone = engine.chat(free)
    sinks = [WaitingSink(), WaitingSink()]
    chats = [
        engine.submit(free, sinks[0]),
        engine.submit(ask(**FORM, temperature=0), sinks[1]),
    ]
    while not all(chat.done for chat in chats):
        engine.step()
    assert sinks[0].completion().choices[0].message == alone.choices[0].message
    valid(sinks[1].completion())


def test_a_form_that_fails_ends_its_own_row_with_one_error(engine: Engine) -> None:
    bad, good = WaitingSink(), WaitingSink()
    chats = [
        engine.submit(ask(guided_choice=["yes"], allowed_token_ids=[5]), bad),
        engine.submit(ask(**FORM, temperature=0), good),
    ]
    while not all(chat.done for chat in chats):
        engine.step()
    valid(good.completion())
    with pytest.raises(JobError) as caught:
        bad.completion()
    assert (caught.value.code, caught.value.param) == ("invalid_request", "allowed_token_ids")
    assert "no token that structured_outputs.choice allows is left" in caught.value.message


def test_an_expression_that_explodes_fails_its_own_row(engine: Engine) -> None:
    pattern = "(?:[a-z]{1,5000}[0-9]?){1,5000}x{400}"
    with pytest.raises(JobError, match=r"structured_outputs\.regex: it is too complex after"):
        engine.chat(ask(guided_regex=pattern, max_tokens=400, seed=1))
    valid(engine.chat(ask(**FORM, temperature=0)))


def test_a_sequence_that_begins_anew_has_the_state_of_its_output(engine: Engine) -> None:
    core = engine._core
    request = ask(**FORM)
    prompt = core.prompts.build(request)
    params = core.sampling_params(
        request, prompt.token_ids, core.loaded.constraint(request, prompt)
    )
    output = core.tokenizer.encode('{"name')
    stepped = SamplingInput(params, 0, prompt.token_ids)
    for token_id in output:
        stepped.advance([token_id])
    again = SamplingInput(params, 0, prompt.token_ids, output)
    assert stepped.matcher and again.matcher and stepped.matcher.inner and again.matcher.inner
    assert not stepped.foreseeable  # its masks wait for the token before
    assert again.matcher.inner.compute_bitmask() == stepped.matcher.inner.compute_bitmask()
    first = SamplingInput(params, 0, prompt.token_ids).matcher
    assert (
        first
        and first.inner
        and first.inner.compute_bitmask() != again.matcher.inner.compute_bitmask()
    )


def test_a_preempted_answer_has_its_form(
    folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = {"enum": ["abc", "defg"]}
    schema = {"type": "array", "items": items, "minItems": 28, "maxItems": 28}
    fields: dict[str, Any] = {"guided_json": schema, "max_tokens": 480, "temperature": 1}
    requests = [ask(**fields, seed=seed) for seed in range(4)]
    alone = [engine.chat(request) for request in requests]
    longest = max(one.usage.total_tokens for one in alone if one.usage)
    limit = engine._core.book.bytes_for_one(longest) * 2  # all may start, two may finish
    tight = Engine.load(str(folder), device="cpu", max_batch=4, cache_bytes=limit)
    preempted: list[int] = []
    preempt = Scheduler._preempt

    def watched(self: Scheduler, sequence: Sequence) -> None:
        preempted.append(len(sequence.output_ids))
        preempt(self, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", watched)
    sinks = [WaitingSink() for _ in requests]
    chats = [tight.submit(one, sink) for one, sink in zip(requests, sinks, strict=True)]
    while not all(chat.done for chat in chats):
        tight.step()
    answers = [sink.completion() for sink in sinks]
    tight.close()
    assert any(preempted)  # within their answers
    for answer in answers:
        assert answer.choices[0].finish_reason == "stop"
        value = json.loads(answer.text)
        assert len(value) == 28 and {*value} <= {"abc", "defg"}
    assert [answer.text for answer in answers] == [one.text for one in alone]


@pytest.mark.parametrize("draft", [None, "itself"])
def test_a_constrained_answer_goes_on_after_a_failed_step(
    folder: Path, engine: Engine, draft: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampling input is made again from the tokens that the answer has."""
    request = ask(**FORM, temperature=0)
    model = str(folder)
    failing = Engine.load(model, device="cpu", max_batch=2, draft=draft and model)
    core, steps = failing._core, 0
    draw = core.runner.draw

    def fail_once(*given: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 9:
            raise RuntimeError("a step fails")
        return draw(*given)

    monkeypatch.setattr(core.runner, "draw", fail_once)
    sinks = [WaitingSink() for _ in range(2)]
    chats = [failing.submit(request, sink) for sink in sinks]
    while not all(chat.done for chat in chats):
        failing.step()
    assert [sink.completion().text for sink in sinks] == valid(engine.chat(request)) * 2
    failing.close()


@pytest.mark.parametrize("draft", ["ngram", "itself"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_drafts_do_not_change_a_constrained_answer(
    folder: Path, engine: Engine, draft: str, temperature: float
) -> None:
    request = ask(**FORM, temperature=temperature, seed=5, n=2)
    drafting = Engine.load(
        str(folder),
        device="cpu",
        max_batch=2,
        draft=str(folder) if draft == "itself" else draft,
        draft_tokens=3,
    )
    completion = drafting.chat(request)
    assert valid(completion) == valid(engine.chat(request))
    usage = completion.usage
    assert usage and usage.completion_tokens_details
    if draft == "itself":
        assert usage.completion_tokens_details.accepted_prediction_tokens
    drafting.close()


def test_a_forced_call_is_read_as_a_call(engine: Engine) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"enum": [1, 22]}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
            },
        }
        for name in ("add", "times")
    ]
    for choice, names in (
        ("required", {"add", "times"}),
        ({"type": "function", "function": {"name": "times"}}, {"times"}),
    ):
        completion = engine.chat(
            ask(
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=False,
                max_tokens=300,
                seed=1,
            )
        )
        (one,) = completion.choices
        assert one.finish_reason == "tool_calls" and one.message.content is None
        (call,) = one.message.tool_calls or []
        assert call.function.name in names
        assert json.loads(call.function.arguments)["a"] in (1, 22)


@pytest.mark.parametrize("thinks", [True, False])
def test_the_form_of_a_request_begins_behind_its_reasoning(engine: Engine, thinks: bool) -> None:
    """As the prompt is: a template may have ended the reasoning."""
    core = engine._core
    request = ask(**FORM, enable_thinking=thinks)
    constraint = core.loaded.constraint(request, core.prompts.build(request))
    assert constraint is not None
    opening = core.tokenizer.id_of("<think>")
    assert opening is not None
    thoughts = [opening, *core.tokenizer.encode("so, hm")]
    assert constraint.matcher(frozenset()).legal(thoughts) == (len(thoughts) if thinks else 0)
    answer = core.tokenizer.encode('{"name')
    assert constraint.matcher(frozenset()).legal(answer) == len(answer)


def test_no_token_of_a_draft_that_the_form_refuses_is_computed(
    folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting = Engine.load(str(folder), device="cpu", max_batch=1, draft="ngram", draft_tokens=3)
    legal, refused = (drafting._core.tokenizer.encode(text)[0] for text in ("aa", "z"))
    monkeypatch.setattr(Lookup, "following", lambda *_: [legal, legal, refused])
    drafted: list[list[int]] = []
    extend = Speculation.extend

    def record(speculation: Speculation, *given: Any) -> list[ScheduledSequence]:
        scheduled = extend(speculation, *given)
        drafted.extend([*one.draft.token_ids] for one in scheduled)
        return scheduled

    monkeypatch.setattr(Speculation, "extend", record)
    request = ask(guided_regex="a{30}", max_tokens=40, temperature=0)
    assert drafting.chat(request).text == "a" * 30
    proposed = [draft for draft in drafted if draft]
    assert proposed and {token for draft in proposed for token in draft} == {legal}
    drafting.close()
