"""Scoring requests are checked when they are made, their items when they are scored."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import Choice, LogLikelihood, Perplexity, ScoreRequest
from jobs.api.score_request import MAX_ITEMS, parse_item
from jobs.errors import InvalidRequest
from jobs.operations import SCORE, operation_for, parse_request

ITEM: dict[str, Any] = {"type": "loglikelihood", "prompt": "a", "continuations": ["b", "c"]}


def request(**fields: Any) -> ScoreRequest:
    return ScoreRequest.parse({"model": "m", "items": [ITEM], **fields})


def test_a_request_is_the_same_from_objects_and_from_json() -> None:
    objects = [
        LogLikelihood(prompt="a", continuations=["b", [1, 2]], custom_id="x"),
        Choice(messages=[{"role": "user", "content": "a"}], choices=["b"], target="b"),
        Perplexity(text="a b", stride=4, row=7),
    ]
    made = ScoreRequest(model="m", items=objects, job={"run": "r"})
    again = parse_request(made.to_json())
    assert again == made
    assert operation_for(again) is SCORE
    assert [type(parse_item(item)) for item in made.items] == [LogLikelihood, Choice, Perplexity]
    assert [parse_item(item) for item in made.items] == objects
    assert SCORE.cost(made) == 4  # two continuations, a choice and a text


def test_a_text_costs_as_many_sequences_as_it_has_windows() -> None:
    """A text of unknown tokens as many as a typical one."""
    ids = {"type": "perplexity", "text": [1] * 1000}
    for item, cost in (
        ({**ids, "window": 100}, 10),
        ({**ids, "window": 100, "stride": 1}, 901),
        ({**ids, "stride": 1}, 1),
        ({"type": "perplexity", "text": "word" * 1000, "window": 100, "stride": 50}, 19),
        ({"type": "perplexity", "text": "word", "window": "x", "stride": -1}, 1),
        ({"type": "perplexity", "text": None}, 1),
    ):
        assert request(items=[item]).cost == cost
    assert request(items=[ids], max_length=100).cost == 10


def test_items_of_any_kind_are_taken_and_fail_when_they_are_parsed() -> None:
    for item in (7, "x", None, [], {}, {"type": []}, {**ITEM, "foo": 1}, {**ITEM, "prompt": 5}):
        assert request(items=[item, ITEM]).items == [item, ITEM]
        with pytest.raises(InvalidRequest):
            parse_item(item)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no items": ({"items": []}, "items is empty"),
    "too many": ({"items": [ITEM] * (MAX_ITEMS + 1)}, "items: "),
    "no list": ({"items": 5}, "items: expected a list"),
    "unknown": ({"foo": 1}, "unknown field 'foo'"),
    "truncate": ({"truncate": "right"}, "truncate: must be 'left'"),
    "session": ({"job": {"session": "s"}}, "job.session: a scoring job is no turn"),
    "custom_id": ({"job": {"custom_id": "x"}}, "job.custom_id: each item has its own"),
    "not JSON": ({"items": [{"a": float("nan")}]}, "numbers must be finite"),
    "one row twice": (
        {"items": [{**ITEM, "row": 3}, ITEM, {**ITEM, "row": 3}]},
        r"items: 0 and 2 have one row \(3, repeat 0\)",
    ),
    "a row by its place": (
        {"items": [{**ITEM, "row": 6}, ITEM], "job": {"row": 5}},
        r"items: 0 and 1 have one row \(6, repeat 0\)",
    ),
}


@pytest.mark.parametrize("fields", REFUSED)
def test_bad_requests_are_refused_with_their_field(fields: str) -> None:
    bad, words = REFUSED[fields]
    with pytest.raises(InvalidRequest, match=words):
        request(**bad)


def test_repeats_of_a_row_are_rows_of_their_own() -> None:
    repeats = [{**ITEM, "row": 3, "repeat": number} for number in range(3)]
    assert len(request(items=repeats).items) == 3


def test_objects_check_their_fields_when_they_are_made() -> None:
    with pytest.raises(InvalidRequest, match="either prompt or messages"):
        LogLikelihood(continuations=["a"])
    with pytest.raises(InvalidRequest, match="number 0 is empty"):
        Choice(prompt="a", choices=[""])
    with pytest.raises(InvalidRequest, match="stride: at most the window"):
        Perplexity(text="a", window=4, stride=5)
