"""Metrics that compare text, on known pairs."""

from __future__ import annotations

from decimal import Decimal

import pytest

from jobs.errors import InvalidRequest
from jobs.scores.outcome import Outcome
from jobs.scores.spec import parse_spec
from jobs.scores.text import last_number, letter_choice


def scored(metric: str, text: str, target: str | None = None) -> Outcome:
    spec = parse_spec(metric)
    return spec.make().score({"text": text, "target": target})


@pytest.mark.parametrize(
    ("metric", "text", "target", "value"),
    [
        ("exact", " Paris\n", "Paris", 1),
        ("exact", "paris", "Paris", 0),
        ("exact", "Paris.", "Paris", 0),
        ("exact:case", "paris", "Paris", 1),
        ("exact:case,punctuation", "paris.", "Paris", 1),
        ("exact:case", "paris.", "Paris", 0),
        # SQuAD's own example of its normalisation: case, punctuation, articles, white space
        ("exact:normalize", "The  Eiffel Tower!", "eiffel tower", 1),
        ("exact", "b", '["a", "b"]', 1),
        ("exact", '["a", "b"]', '["a", "b"]', 1),
        ("exact", "c", '["a", "b"]', 0),
        ("exact", "[1, 2]", "[1, 2]", 1),
        ("contains", "It is Paris, I think", "Paris", 1),
        ("contains", "It is paris", "Paris", 0),
        ("contains:case", "It is paris", "Paris", 1),
        ("contains", "It is Rome", '["Paris", "Rome"]', 1),
        ("number", "it is 1e999999999", "5", 0),
        ("number:0.5", "-1e999999999", "1e999999999", 0),
        ("number", "in commit 12e5678901234567890123456", "5", 0),
        ("number", "12e5678901234567890123456", "12e5678901234567890123456", 1),
        ("number", "1e-5678901234567890123456", "0", 1),
        ("regex:^yes", "yes, it is", None, 1),
        ("regex:^yes", "oh yes", None, 0),
        (r"regex:#### (\S+)", "2 + 3\n#### 5", "5", 1),
        (r"regex:#### (\S+)", "#### 4 or rather #### 5", "5", 1),
        (r"regex:#### (\S+)", "5", "5", 0),
        ("number", "so it costs $1,234.50.", "1234.5", 1),
        ("number", "3 - 5 = -2", "-2", 1),
        ("number", "10-5", "5", 1),
        ("number", "no idea", "5", 0),
        ("number", "17.9", "18", 0),
        ("number:0.1", "17.9", "18", 1),
        ("number", "72", "He sold 48/2 = 24.\n#### 72", 1),
    ],
)
def test_known_pairs(metric: str, text: str, target: str | None, value: float) -> None:
    assert scored(metric, text, target).value == value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", "18"),
        ("a 1,000,000 b", "1000000"),
        ("1,23", "23"),
        ("-.5", "-0.5"),
        ("\u22127", "-7"),
        ("-$5", "-5"),
        ("2e-4", "0.0002"),
        ("x2-3", "3"),
        ("none", None),
        ("1" * 400, "1" * 400),
    ],
)
def test_last_numbers(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("B. Paris", "B"),
        ("So the answer is (C).", "C"),
        ("The answer is A because B is wrong (see D)", "A"),
        ("Answer: **D**", "D"),
        (r"\boxed{E}", "E"),
        ("(A) is wrong, so it must be (B)", "B"),
        ("I don't know", None),
        ("A good question", None),
    ],
)
def test_a_chat_names_its_choice(text: str, letter: str | None) -> None:
    for target in "ABCDE":
        outcome = letter_choice(text, f"({target})")
        assert outcome.answer == letter
        assert outcome.value == (target == letter)


def test_edit_similarity_equals_a_calculation_by_hand() -> None:
    # kitten → sitting: 3 edits, 7 letters
    assert scored("edit", "kitten", "sitting").value == pytest.approx(1 - 3 / 7)
    assert scored("edit", "same", '["other", "same"]').value == 1.0


@pytest.mark.parametrize("metric", ["exact", "contains", "number", "choice", "edit"])
def test_a_row_without_a_target_is_an_error(metric: str) -> None:
    with pytest.raises(ValueError, match="has no target"):
        scored(metric, "a")


def test_a_target_of_another_type_is_an_error_that_quotes_it() -> None:
    with pytest.raises(ValueError, match="'Paris' holds no number"):
        scored("number", "5", "Paris")
    with pytest.raises(ValueError, match="'Paris' is no letter"):
        scored("choice", "B", "Paris")


@pytest.mark.parametrize(
    ("metric", "fact"),
    [
        ("exakt", "did you mean exact?"),
        ("exact:", "nothing after the colon"),
        ("pass@5", "pass@5 needs the metric"),
        ("pass@5:pass@2:exact", "not defined"),
        ("pass@0:exact", "no metric 'pass@0'"),
        ("exact,number", "repeat the option, --metric exact --metric number"),
    ],
)
def test_a_metric_that_does_not_exist_is_refused(metric: str, fact: str) -> None:
    with pytest.raises(InvalidRequest, match=fact.replace("?", r"\?")):
        parse_spec(metric)


@pytest.mark.parametrize(
    ("metric", "fact"),
    [
        ("exact:cases", "unknown normalisation 'cases'"),
        ("regex:(", "not a valid regular expression"),
        ("regex", "regex needs a pattern"),
        ("number:x", "'x' is not a tolerance"),
        ("number:-1", "'-1' is not a tolerance"),
        ("choice:best", "'best' is no way"),
    ],
)
def test_a_wrong_argument_is_refused(metric: str, fact: str) -> None:
    spec = parse_spec(metric)
    with pytest.raises(InvalidRequest, match=fact):
        spec.make()
