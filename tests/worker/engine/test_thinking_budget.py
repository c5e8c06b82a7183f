"""thinking_token_budget: after so many tokens of reasoning, the mark that ends it is forced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import ChatRequest, JobError, Sampling
from jobs.api.answer import ChatCompletion
from tests.worker.checkpoints import make_checkpoint
from tests.worker.engine.chat_requests import PROMPT, WaitingSink, ask
from tests.worker.engine.drafted import perturbed
from tests.worker.tokenizers import make_tokenizer
from worker import Engine
from worker.checkpoint.tokenizer import Tokenizer
from worker.constraints.constraint import Constraint
from worker.constraints.masks import MaskedRow, legal_tokens
from worker.constraints.thinking_budget import ThinkingBudget
from worker.speculative.acceptance import Acceptance
from worker.speculative.ngram import Lookup
from worker.text.harmony import FINAL, HarmonySplitter
from worker.text.reasoning import ReasoningSplitter, ReasoningTags, Splitter

TAGS = ReasoningTags("<think>", "</think>")
FORM: dict[str, Any] = {"guided_regex": "[0-9]{3}"}
# A template after which the model thinks until it is stopped: its weights are random.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    loaded = Engine.load(str(folder), device="cpu", max_batch=8)
    yield loaded
    loaded.close()


def think(budget: int | None, **fields: Any) -> ChatRequest:
    fields = {"max_tokens": 40, "seed": 3, "thinking_token_budget": budget, **fields}
    return ask(**fields, ignore_eos=None if "guided_regex" in fields else True)


def reasoned(completion: ChatCompletion) -> int:
    assert completion.usage and completion.usage.completion_tokens_details
    return completion.usage.completion_tokens_details.reasoning_tokens


def tokens(completion: ChatCompletion) -> list[list[int]]:
    return [choice.token_ids or [] for choice in completion.choices]


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.5, "top_k": 9},
        {"temperature": 1, "repetition_penalty": 1.3, "min_tokens": 20},
        {"bad_words": ["the"], "logprobs": True},
    ],
    ids=str,
)
def test_the_answer_begins_when_the_budget_is_used_up(
    engine: Engine, budget: int, fields: dict[str, Any]
) -> None:
    (free,) = tokens(engine.chat(think(None, return_token_ids=True, **fields)))
    completion = engine.chat(think(budget, return_token_ids=True, **fields))
    (ids,) = tokens(completion)
    mark = engine.tokenizer.id_of("</think>")
    assert mark not in free[: budget + 1]
    assert (ids[:budget], ids[budget]) == (free[:budget], mark)
    assert reasoned(completion) == budget
    assert len(ids) == 40  # the answer goes on
    assert completion.choices[0].message.content


def test_each_choice_has_a_budget_of_its_own(engine: Engine) -> None:
    completion = engine.chat(think(5, n=3, return_token_ids=True))
    mark = engine.tokenizer.id_of("</think>")
    assert [ids.index(mark or 0) for ids in tokens(completion)] == [5, 5, 5]
    assert reasoned(completion) == 15
    assert len({str(ids) for ids in tokens(completion)}) == 3


def test_the_row_names_the_budget(engine: Engine) -> None:
    sink = WaitingSink()
    chat = engine.submit(think(5, max_tokens=2), sink)
    while not chat.done:
        engine.step()
    assert sink.completion() and sink.outcome and sink.outcome.sampling
    assert sink.outcome.sampling.thinking_token_budget == 5


def test_reasoning_that_ends_earlier_is_as_without_a_budget(engine: Engine) -> None:
    mark = engine.tokenizer.id_of("</think>")
    ended = 0
    for seed in range(8):
        fields = {"logit_bias": {mark: 4}, "seed": seed, "return_token_ids": True}
        free = engine.chat(think(None, **fields))
        ended += reasoned(free) < 20
        if reasoned(free) < 20:
            assert tokens(engine.chat(think(20, **fields))) == tokens(free)
    assert ended


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 9])
def test_the_form_begins_after_the_forced_mark(engine: Engine, budget: int) -> None:
    completion = engine.chat(think(budget, temperature=1, **FORM))
    (choice,) = completion.choices
    assert choice.finish_reason == "stop" and reasoned(completion) == budget
    assert choice.message.content and choice.message.content.isdigit()
    assert len(choice.message.content) == 3


def test_the_form_begins_where_the_budget_ends_within_a_character(engine: Engine) -> None:
    """No end of the reasoning is legal there, as it is text."""
    first, *_ = engine.tokenizer.encode("\U0001f600")
    assert not engine.tokenizer.token_bytes(first).decode(errors="ignore")
    completion = engine.chat(think(1, temperature=0, logit_bias={first: 100}, **FORM))
    assert (reasoned(completion), completion.choices[0].finish_reason) == (1, "stop")
    assert completion.text.isdigit()


@pytest.mark.parametrize("draft", ["ngram", "itself", "another"])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1}, FORM], ids=str)
def test_drafts_do_not_change_the_tokens(
    folder: Path, engine: Engine, draft: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    reference = draft
    if draft != "ngram":
        reference = str(folder if draft == "itself" else perturbed(folder, tmp_path / "draft"))
    drafting = Engine.load(str(folder), device="cpu", max_batch=2, draft=reference, draft_tokens=4)
    for budget in (3, 10):
        request = think(budget, n=2, return_token_ids=True, **fields)
        assert tokens(drafting.chat(request)) == tokens(engine.chat(request))
    drafting.close()


def test_no_forced_token_is_part_of_a_draft(
    folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = engine.tokenizer.encode("a")[0]
    asked: list[int] = []

    def following(lookup: Lookup, ids: Any, number: int) -> list[int]:
        asked.append(number)
        return [word] * number

    monkeypatch.setattr(Lookup, "following", following)
    length = Acceptance.length
    monkeypatch.setattr(Acceptance, "length", lambda *given: max(given[1], length(*given)))
    drafting = Engine.load(str(folder), device="cpu", max_batch=1, draft="ngram", draft_tokens=4)
    request = think(3, temperature=0, logit_bias={word: 100}, return_token_ids=True, max_tokens=9)
    (ids,) = tokens(drafting.chat(request))
    drafting.close()
    assert asked == [2, 4]  # the rest of the budget after a token, and after the mark and a token
    assert ids == [word] * 3 + [engine.tokenizer.id_of("</think>")] + [word] * 5


@pytest.mark.parametrize("steps", [3, 6, 8], ids=["reasoning", "mark", "answer"])
@pytest.mark.parametrize("fields", [{}, FORM], ids=["free", "form"])
def test_a_preempted_sequence_keeps_its_budget(
    engine: Engine, steps: int, fields: dict[str, Any]
) -> None:
    request = think(5, max_tokens=12, return_token_ids=True, **fields)
    expected, sink, scheduler = engine.chat(request), WaitingSink(), engine._core._scheduler
    chat = engine.submit(request, sink)
    for _ in range(steps):
        engine.step()
    (sequence,) = scheduler.running
    assert sequence.output_ids
    scheduler._preempt(sequence)
    while not chat.done:
        engine.step()
    assert tokens(sink.completion()) == tokens(expected)


@pytest.mark.parametrize("failing_step", [3, 6, 9], ids=["reasoning", "mark", "answer"])
@pytest.mark.parametrize("fields", [{}, FORM], ids=["free", "form"])
def test_a_failed_step_does_not_change_the_tokens(
    folder: Path,
    engine: Engine,
    failing_step: int,
    fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = think(5, temperature=1, return_token_ids=True, **fields)
    failing = Engine.load(str(folder), device="cpu", max_batch=2)
    core, steps = failing._core, 0
    draw = core.runner.draw

    def fail_once(*given: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == failing_step:
            raise RuntimeError("a step fails")
        return draw(*given)

    monkeypatch.setattr(core.runner, "draw", fail_once)
    sinks = [WaitingSink() for _ in range(2)]
    chats = [failing.submit(request, sink) for sink in sinks]
    while not all(chat.done for chat in chats):
        failing.step()
    failing.close()
    assert steps > failing_step
    assert [tokens(sink.completion()) for sink in sinks] == [tokens(engine.chat(request))] * 2


def test_a_row_waits_for_the_token_before_only_where_one_may_be_forced(engine: Engine) -> None:
    """Elsewhere its steps overlap, and it has no mask."""
    budget = ThinkingBudget(3, (7,), ReasoningSplitter(TAGS, inside=True), lambda _: "a")
    matcher = Constraint(budget=budget).matcher(frozenset())
    free = []
    for token_id in (1, 1, 1, 7, 1):
        free.append((matcher.is_free(1), matcher.is_free(2), matcher.forced))
        matcher.advance([token_id])
    assert free == [
        *((True, True, None), (True, True, None), (True, False, None)),
        *((False, False, 7), (True, True, None)),
    ]


def of_text(text: str, style: Any, splitter: Splitter, mark: str) -> tuple[str, list[int]]:
    """A text, up to where a budget of 3 tokens forces its mark and with it; and the mark."""
    made = Tokenizer(make_tokenizer(style).to_str(), Path("tokenizer.json"))
    ids = tuple(made.encode(mark))

    def text_of(token_id: int) -> str:
        return made.token_bytes(token_id).decode(errors="replace")

    matcher = Constraint(budget=ThinkingBudget(3, ids, splitter, text_of)).matcher(frozenset())
    found: list[int] = []
    for token_id in made.encode(text):
        while (forced := matcher.forced) is not None:
            found.append(forced)
            matcher.advance([forced])
        if matcher.room is None:
            break
        found.append(token_id)
        matcher.advance([token_id])
    return "".join(map(text_of, found)), [*ids]


def test_a_mark_of_several_tokens_is_forced_as_a_whole() -> None:
    splitter = ReasoningSplitter(TAGS, inside=False)
    text, mark = of_text("<think>\n1 2 3 4 5 6", "llama2", splitter, TAGS.closing)
    assert len(mark) > 1
    assert text.strip().startswith("<think>") and text.endswith("</think>")
    assert "6" not in text


def test_reasoning_in_the_harmony_format_ends_in_the_channel_final() -> None:
    text, _ = of_text(
        "<|channel|>analysis<|message|>1,2,3,4,5,6",
        "harmony",
        HarmonySplitter("<|start|>assistant"),
        FINAL,
    )
    assert text.startswith("<|channel|>analysis<|message|>1,2")
    assert text.endswith("<|end|><|start|>assistant<|channel|>final<|message|>")
    assert "5" not in text


def test_messages_in_the_harmony_format_share_one_budget() -> None:
    text, _ = of_text(
        "<|channel|>analysis<|message|>1,<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "8,8,8,8<|end|><|start|>assistant<|channel|>analysis<|message|>2,3",
        "harmony",
        HarmonySplitter("<|start|>assistant"),
        FINAL,
    )
    assert text.count("analysis") == 2 and text.count("8") == 4
    assert text.endswith(f"<|message|>2{FINAL}")


def test_the_mask_after_a_draft_that_uses_the_budget_up_is_the_mark() -> None:
    budget = ThinkingBudget(2, (40,), ReasoningSplitter(TAGS, inside=True), lambda _: "a")
    matcher = Constraint(budget=budget).matcher(frozenset())
    masks = legal_tokens([MaskedRow(0, matcher, [1, 2])], 64).view("uint32").tolist()
    assert masks == [[2**32 - 1] * 2, [2**32 - 1] * 2, [0, 1 << 8]]
    assert matcher.legal([1, 2, 40]) == 2
    assert matcher.forced is None  # asking changes nothing


def test_a_mark_that_another_option_excludes_is_one_error(engine: Engine) -> None:
    allowed = engine.tokenizer.encode("a")
    with pytest.raises(JobError) as caught:
        engine.chat(think(3, allowed_token_ids=allowed))
    assert (caught.value.code, caught.value.param) == ("invalid_request", "allowed_token_ids")
    assert "no token that thinking_token_budget allows is left after 3 tokens" in str(caught.value)


def test_a_model_without_marks_is_named(folder: Path) -> None:
    plain = Engine.load(str(folder), device="cpu")
    plain._core.loaded = replace(plain._core.loaded, tags=None)
    with pytest.raises(JobError, match=r"thinking_token_budget: model \S+ has no mark that ends"):
        plain.chat(think(3))
    plain.close()


def test_prompts_that_are_no_chat_have_no_budget(engine: Engine) -> None:
    with pytest.raises(JobError, match="thinking_token_budget: the prompt is no chat"):
        engine.generate([PROMPT], Sampling(thinking_token_budget=3))
    with pytest.raises(JobError, match="thinking_token_budget: reasoning is known of chats alone"):
        think(3, apply_chat_template=False)
