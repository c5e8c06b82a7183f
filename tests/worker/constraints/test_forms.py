"""Grammars over the tokenizers of all families: what is legal, and where an answer ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.api import grammar as grammars
from jobs.api.grammar import Grammar, named
from jobs.api.tool_choice import Forced
from jobs.errors import InvalidRequest
from tests.worker.tokenizers import STYLES, Style, make_tokenizer
from worker.checkpoint.tokenizer import Tokenizer
from worker.constraints.calls import call_grammar, forced_calls
from worker.constraints.constraint import Constraint
from worker.constraints.grammars import CompiledGrammar, Grammars
from worker.constraints.masks import MaskedRow, apply_masks, legal_tokens
from worker.constraints.matcher import Matcher
from worker.constraints.reasoning import Thinking, by_harmony, by_tags, literal
from worker.constraints.vocabulary import grammar_vocabulary
from worker.text.reasoning import ReasoningTags
from worker.text.tool_parser import SYNTAXES, ToolParser

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PADDED = 37  # ids that only the model has


class Model:
    """A tokenizer with end tokens, and what its completions may be."""

    def __init__(self, style: Style) -> None:
        text = make_tokenizer(style).to_str()
        self.tokenizer = Tokenizer(text, Path("tokenizer.json"))
        self.size = self.tokenizer.vocab_size + PADDED
        special = [i for i in range(self.size) if self.tokenizer.is_special(i)]
        self.ends = frozenset(special[:2])
        self.spare = special[2] if len(special) > 2 else special[0]
        self.grammars = Grammars(
            lambda: grammar_vocabulary(self.tokenizer, self.size, self.ends), self.ends, "m"
        )

    def compiled(self, form: Grammar, thinking: Thinking | None = None) -> CompiledGrammar:
        parts = (thinking or Thinking()).before("answer") + named("answer", form)
        return self.grammars.compile(parts, form)

    def matcher(self, form: Grammar, thinking: Thinking | None = None) -> Matcher:
        return Constraint(self.compiled(form, thinking)).matcher(self.ends)

    def follow(self, text: str, matcher: Matcher) -> bool:
        """Whether all tokens of a text are legal."""
        ids = self.ids(text)
        legal = matcher.legal(ids) == len(ids)
        if legal:
            matcher.advance(ids)
        return legal

    def ids(self, text: str) -> list[int]:
        """Tokens that spell a text without a space before it."""
        found = self.tokenizer.encode(f"\n{text}")
        return found[next(i for i in range(len(found)) if self.written(found[i:]) == text) :]

    def written(self, ids: list[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode()

    def legal(self, matcher: Matcher) -> set[int]:
        bits = legal_tokens([MaskedRow(0, matcher)], self.size).view(np.uint8)
        return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self.size]).tolist())


MODELS = {style: Model(style) for style in STYLES}


@pytest.fixture(params=STYLES)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture
def qwen() -> Model:
    return MODELS["qwen"]


def person() -> Grammar:
    return grammars.of_schema(PERSON, "response_format")


def test_every_kind_of_tokenizer_spells_a_valid_answer(model: Model) -> None:
    matcher = model.matcher(person())
    assert model.follow('{"name": "Zoë 你", "age": 4', matcher)
    before = matcher.whole
    assert model.follow("}", matcher)
    assert (before, matcher.whole, matcher.error) == (False, True, None)


def test_the_legal_tokens_are_those_that_begin_an_answer(model: Model) -> None:
    """Of all tokens, special ones and ids that only the model has included."""
    matcher = model.matcher(grammars.of_choice(["dog", "answer"], "choice"))
    expected = {
        token_id
        for token_id in range(model.size)
        if (text := model.tokenizer.token_bytes(token_id))
        and any(word.startswith(text) for word in (b"dog", b"answer"))
        and not model.tokenizer.is_special(token_id)
    }
    assert expected and model.legal(matcher) == expected


def test_every_end_token_is_legal_where_the_answer_may_end_and_only_there(model: Model) -> None:
    matcher = model.matcher(grammars.of_regex("[0-9]+", "regex"))
    assert not model.legal(matcher) & model.ends
    matcher.advance(model.ids("4"))
    assert model.legal(matcher) >= model.ends
    for end in model.ends:
        copy = model.matcher(grammars.of_regex("[0-9]+", "regex"))
        copy.advance([*model.ids("4"), end])
        assert copy.error is None


def test_a_stop_token_of_the_request_is_legal_at_the_end_only(model: Model) -> None:
    form = grammars.of_regex("[0-9]{2}a?", "regex")
    matcher = Constraint(model.compiled(form)).matcher(model.ends | {model.spare})
    matcher.advance(model.ids("4"))
    assert model.spare not in model.legal(matcher)
    matcher.advance(model.ids("2"))
    assert model.spare in model.legal(matcher)
    matcher.advance([model.spare])
    assert matcher.error is None
    matcher.rollback(1)
    assert model.follow("a", matcher)


def test_a_stop_token_of_the_request_before_the_end_is_an_error(qwen: Model) -> None:
    form = grammars.of_regex("[0-9]{2}", "regex")
    matcher = Constraint(qwen.compiled(form)).matcher(qwen.ends | {qwen.spare})
    matcher.advance([*qwen.ids("4"), qwen.spare])
    assert matcher.error is not None


@pytest.mark.parametrize(("spaces", "legal"), [(0, True), (1, True), (8, True), (9, False)])
def test_white_space_in_json_has_at_most_eight_characters(
    qwen: Model, spaces: int, legal: bool
) -> None:
    blank = "\n" * spaces
    assert qwen.follow(f'{{{blank}"name":{blank}"a"', qwen.matcher(person())) is legal


@pytest.mark.parametrize("text", [' {"name": "a"', "\n{"])
def test_white_space_before_json_is_not_legal(qwen: Model, text: str) -> None:
    assert not qwen.follow(text, qwen.matcher(person()))


@pytest.mark.parametrize("place", ["$", "$.properties.at", "$.$defs.at"])
@pytest.mark.parametrize(
    ("name", "fraction", "taken"),
    [
        ("time", "", True),
        ("time", ".123456789", True),
        ("time", ".12345678901", False),
        ("date-time", ".123456789", True),
        ("date-time", ".12345678901", False),
    ],
)
def test_the_digits_after_a_second_are_limited(
    qwen: Model, name: str, fraction: str, taken: bool, place: str
) -> None:
    form: dict[str, Any] = {"type": "string", "format": name}
    day = "2026-01-31T" if name == "date-time" else ""
    text = f'"{day}10:20:30{fraction}+02:00"'
    if place != "$":
        held = {"$ref": "#/$defs/at"} if "defs" in place else form
        form = {"type": "object", "properties": {"at": held}, "$defs": {"at": form}}
        text = f'{{"at":{text}}}'
    matcher = qwen.matcher(grammars.of_schema(form, "f"))
    assert qwen.follow(text, matcher) is taken


def test_a_limit_of_a_time_that_the_schema_has_holds(qwen: Model) -> None:
    form = {"type": "string", "format": "time", "maxLength": 40}
    assert qwen.follow(f'"10:20:30.{"1" * 20}Z"', qwen.matcher(grammars.of_schema(form, "f")))


def test_data_of_a_schema_is_left_as_it_is(qwen: Model) -> None:
    """What looks like a schema in `const` and `enum` is a value."""
    value = {"format": "time"}
    for form in ({"const": value}, {"enum": [value]}):
        assert qwen.follow('{"format":"time"}', qwen.matcher(grammars.of_schema(form, "f")))


def test_a_matcher_is_rebuilt_from_its_tokens(model: Model) -> None:
    ids = model.ids('{"name": "ab", "age"')
    one, other = model.matcher(person()), model.matcher(person())
    for token_id in ids:
        one.advance([token_id])
    other.advance(ids)
    assert model.legal(one) == model.legal(other)


def test_tokens_can_be_taken_back(model: Model) -> None:
    matcher = model.matcher(person())
    matcher.advance(model.ids('{"name": "'))
    before, more = model.legal(matcher), model.ids('abc", "age')
    matcher.advance(more)
    matcher.rollback(len(more))
    assert model.legal(matcher) == before


def test_tokens_after_the_end_can_be_taken_back_with_those_before_it(qwen: Model) -> None:
    """A draft model draws on after the end, where no token is legal."""
    matcher = qwen.matcher(person())
    matcher.advance(qwen.ids('{"name": "ab", "age": 12\n'))
    before = qwen.legal(matcher)
    draft = [*qwen.ids("}"), *qwen.ends, *qwen.ids("a")]
    matcher.advance(draft)
    assert matcher.whole
    matcher.rollback(len(draft))
    assert qwen.legal(matcher) == before


def test_a_token_that_is_not_legal_ends_in_an_error_and_stays_there(qwen: Model) -> None:
    matcher = qwen.matcher(person())
    matcher.advance(qwen.ids("dog"))
    assert matcher.error is not None and not matcher.whole
    matcher.advance(qwen.ids("{"))
    assert matcher.error is not None


def test_another_matcher_of_the_grammar_knows_nothing_of_an_error(qwen: Model) -> None:
    compiled = qwen.compiled(person())
    bad, good = (Constraint(compiled).matcher(qwen.ends) for _ in range(2))
    bad.advance(qwen.ids("dog"))
    assert good.error is None and qwen.follow('{"name"', good)


def test_a_draft_is_legal_up_to_the_first_refused_token_and_before_an_end_token(
    qwen: Model,
) -> None:
    matcher = qwen.matcher(grammars.of_regex("[0-9]+", "regex"))
    (end, *_), four, dog = qwen.ends, qwen.ids("4"), qwen.ids("dog")
    assert matcher.legal(four * 3 + dog + four) == 3
    assert matcher.legal([*four, end, *four]) == 1
    assert matcher.legal(dog) == 0
    assert matcher.error is None  # asking changes nothing


def test_each_position_of_a_draft_has_the_mask_of_its_place(qwen: Model) -> None:
    draft = qwen.ids('{"name": "ab", "age": 3')
    masks = legal_tokens([MaskedRow(0, qwen.matcher(person()), draft)], qwen.size)
    matcher = qwen.matcher(person())
    for mask, token_id in zip(masks, [*draft, None], strict=True):
        (alone,) = legal_tokens([MaskedRow(0, matcher)], qwen.size)
        assert (mask == alone).all()
        if token_id is not None:
            matcher.advance([token_id])


def test_what_follows_a_refused_token_of_a_draft_is_not_masked(qwen: Model) -> None:
    draft = [*qwen.ids("{"), *qwen.ids("dog"), *qwen.ids("{")]
    matcher = qwen.matcher(person())
    masks = legal_tokens([MaskedRow(0, matcher, draft)], qwen.size)
    assert (masks[2:] == -1).all() and (masks[:2] != -1).any(axis=1).all()
    assert matcher.error is None


def test_masks_change_their_rows_alone(model: Model) -> None:
    matcher = model.matcher(person())
    rows = torch.zeros(3, model.size)
    apply_masks(rows, [MaskedRow(1, matcher)])
    kept = set(rows[1].isfinite().nonzero().flatten().tolist())
    assert kept == model.legal(matcher)
    assert rows[0].isfinite().all() and rows[2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_keeps_the_numbers_of_legal_tokens_in_every_dtype(
    qwen: Model, dtype: torch.dtype
) -> None:
    matcher = qwen.matcher(person())
    before = torch.linspace(-3e4, 3e4, qwen.size).to(dtype).expand(2, -1)
    rows = before.clone()
    apply_masks(rows, [MaskedRow(0, matcher), MaskedRow(1, qwen.matcher(person()))])
    legal = torch.zeros(qwen.size, dtype=torch.bool)
    legal[list(qwen.legal(matcher))] = True
    assert torch.equal(rows, before.masked_fill(~legal, float("-inf")))


def test_a_mask_excludes_ids_beyond_its_words() -> None:
    """The width of logits need not be a multiple of 32."""
    model = MODELS["qwen"]
    assert model.size % 32
    rows = torch.zeros(1, model.size)
    apply_masks(rows, [MaskedRow(0, model.matcher(person()))])
    assert rows[0, model.tokenizer.vocab_size :].isinf().all()


# --- structural tags ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "legal"),
    [
        ("no call at all, <fun", True),
        ('so <function=f>{"a": 1}</function> and more', True),
        ('<function=f>{"a": 1}</function><function=g>{"b": "x"}</function>', True),
        ('<function=f>{"a": "x"', False),
        ("<function=h", False),
        ('<function=f>{"a": 1}</functiom', False),
        ("<function=f>words", False),
    ],
)
def test_text_is_free_up_to_a_trigger_and_holds_a_structure_behind_it(
    qwen: Model, text: str, legal: bool
) -> None:
    def structure(name: str, key: str, kind: str) -> tuple[str, str, dict[str, Any], str]:
        schema = {"type": "object", "properties": {key: {"type": kind}}, "required": [key]}
        return "<function=", f"<function={name}>", schema, "</function>"

    tags = [structure("f", "a", "integer"), structure("g", "b", "string")]
    matcher = qwen.matcher(grammars.of_tags(tags, "structural_tag"))
    assert qwen.follow(text, matcher) is legal
    if legal:
        assert qwen.legal(matcher) & qwen.ends  # as text, it may end anywhere


# --- reasoning ------------------------------------------------------------------------------------

TAGS = ReasoningTags("<think>", "</think>")


@pytest.mark.parametrize(
    ("text", "inside", "legal"),
    [
        ('<think>\nhm {"a" </thin </think>\n\n{"name": "', False, True),
        ('{"name": "', False, True),
        ("hm", False, False),
        ('hm, {"name"</think>\n\n{"name": "', True, True),
        ("hm</think>hm", True, False),
        ("hm</think>\n<think>", True, False),
    ],
)
def test_the_form_begins_after_the_thinking(
    model: Model, text: str, inside: bool, legal: bool
) -> None:
    thinking = by_tags(TAGS, model.tokenizer, inside=inside)
    assert model.follow(text, model.matcher(person(), thinking)) is legal


def test_a_draft_over_the_end_of_the_thinking_is_cut_where_the_form_is_left(qwen: Model) -> None:
    matcher = qwen.matcher(person(), by_tags(TAGS, qwen.tokenizer, inside=True))
    right, wrong = qwen.ids('so</think>{"name"'), qwen.ids("dog")
    assert matcher.legal(right + wrong) == len(right)


def test_an_answer_can_not_end_within_its_thinking(qwen: Model) -> None:
    matcher = qwen.matcher(person(), by_tags(TAGS, qwen.tokenizer, inside=True))
    matcher.advance(qwen.ids("hm"))
    assert not qwen.legal(matcher) & qwen.ends


@pytest.mark.parametrize(
    ("prompt", "text", "legal"),
    [
        ("<|start|>assistant", '<|channel|>final<|message|>{"name": "', True),
        (
            "<|start|>assistant",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
            '<|channel|>final<|message|>{"name": "',
            True,
        ),
        ("<|start|>assistant", "<|channel|>final<|message|>hm", False),
        ("<|start|>assistant<|channel|>final<|message|>", '{"name": "', True),
    ],
)
def test_the_form_is_that_of_the_final_message_in_harmony(
    prompt: str, text: str, legal: bool
) -> None:
    model = Model("harmony")
    matcher = model.matcher(person(), by_harmony(model.tokenizer, prompt))
    ids = model.tokenizer.encode(text)
    assert (matcher.legal(ids) == len(ids)) is legal


# --- calls ----------------------------------------------------------------------------------------

WEATHER = Forced(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["c", "f"]},
            "hours": {"type": "array", "items": {"$ref": "#/$defs/hour"}},
        },
        "required": ["city", "hours"],
        "additionalProperties": False,
        "$defs": {"hour": {"type": "integer"}},
    },
    "tools[0].function.parameters",
)
NOW = Forced("now", {"type": "object", "properties": {}, "additionalProperties": False}, "tools[1]")
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3, "hours": [1]}}'
        "\n</tool_call>",
        "\n",
    ),
    "llama3_json": (
        '{"name": "weather", "parameters": {"city": "Rome", "days": 3, "hours": [1]}}',
        "; ",
    ),
    "pythonic": ('[weather(city="Rome", days=3, hours=[1])]', ", "),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n"
        "3\n</parameter>\n<parameter=hours>\n[1]\n</parameter>\n</function>\n</tool_call>",
        "\n",
    ),
}
ARGUMENTS = {"city": "Rome", "days": 3, "hours": [1]}


def calling(model: Model, syntax: str, *, several: bool = False) -> Matcher:
    write = literal(model.tokenizer)
    parts = call_grammar("answer", syntax, (WEATHER, NOW), write, several=several)
    form = Grammar("[{}]", "tool_choice")
    found = model.grammars.compile(Thinking().before("answer") + parts, form)
    return Constraint(found).matcher(model.ends)


def test_each_syntax_has_a_grammar() -> None:
    assert CALLS.keys() == SYNTAXES.keys()


@pytest.mark.parametrize("syntax", sorted(CALLS))
def test_a_forced_call_is_one_that_the_parser_reads(model: Model, syntax: str) -> None:
    text, _ = CALLS[syntax]
    matcher = calling(model, syntax)
    assert model.follow(text, matcher)
    assert matcher.whole
    parser = ToolParser(SYNTAXES[syntax]({"weather": WEATHER.parameters, "now": NOW.parameters}))
    shown, calls = parser.push(text)
    more, found = parser.flush()
    assert [(one.name, json.loads(one.arguments)) for one in calls + found] == [
        ("weather", ARGUMENTS)
    ]
    assert not shown + more


@pytest.mark.parametrize("syntax", sorted(CALLS))
def test_text_unknown_functions_and_wrong_arguments_are_not_legal(qwen: Model, syntax: str) -> None:
    text, _ = CALLS[syntax]
    assert not qwen.follow("dog", calling(qwen, syntax))
    for old, new in (
        ("weather", "w"),
        ("[1]", '["a"]'),
        ("days", "day"),
        ('"Rome"', "Rome" if syntax != "qwen3_coder" else "1"),
    ):
        if old in text:
            assert not qwen.follow(text.replace(old, new), calling(qwen, syntax)), new


@pytest.mark.parametrize("syntax", sorted(CALLS))
def test_several_calls_are_legal_where_they_may_be_parallel(qwen: Model, syntax: str) -> None:
    text, separator = CALLS[syntax]
    inner = text.strip("[]") if syntax == "pythonic" else text
    two = f"[{inner}{separator}{inner}]" if syntax == "pythonic" else inner + separator + inner
    assert qwen.follow(two, calling(qwen, syntax, several=True))
    assert not qwen.follow(two, calling(qwen, syntax))


def test_a_string_in_pythonic_has_the_escapes_that_both_languages_read(qwen: Model) -> None:
    assert qwen.follow(r'[weather(city="a\"b\n"', calling(qwen, "pythonic"))
    assert not qwen.follow(r'[weather(city="\/', calling(qwen, "pythonic"))


def test_calls_of_an_unknown_syntax_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="start the worker with --tool-parser NAME"):
        forced_calls("answer", (NOW,), None, repr, several=False)


@pytest.mark.parametrize(
    ("tool", "fact"),
    [
        (Forced("a-b", {"type": "object"}, "tools[0]"), "'a-b' is no name in Python"),
        (Forced("f", {"properties": {"a b": {}}}, "tools[0]"), "'a b' is no name in Python"),
        (Forced("f", {"$ref": "#/$defs/a"}, "tools[0]"), "must be in properties, got $ref"),
    ],
)
def test_what_pythonic_can_not_write_is_refused(tool: Forced, fact: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(fact)):
        call_grammar("answer", "pythonic", (tool,), repr, several=False)


# --- limits ---------------------------------------------------------------------------------------


def test_an_expression_that_explodes_ends_in_an_error(qwen: Model) -> None:
    """By the fuel that each step may use, not by a clock."""
    matcher = qwen.matcher(grammars.of_regex("(?:[a-z]{1,5000}[0-9]?){1,5000}x", "regex"))
    for token_id in qwen.ids("ab" * 100):
        qwen.legal(matcher)
        matcher.advance([token_id])
        if matcher.error is not None:
            break
    assert matcher.error is not None


ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}


def test_a_grammar_without_an_answer_is_refused(qwen: Model) -> None:
    with pytest.raises(InvalidRequest) as caught:
        qwen.matcher(grammars.of_schema(ENDLESS, "response_format"))
    assert caught.value.param == "response_format"


def test_compiled_grammars_are_kept_by_their_text(qwen: Model) -> None:
    first: Any = qwen.compiled(person()).start
    assert qwen.compiled(person()).start is first
