"""Deltas: their wire form and how they are joined."""

from __future__ import annotations

import json

import pytest

from jobs.api.answer import TokenLogprob, TopLogprob
from jobs.api.chunk import ToolCallDelta
from jobs.api.message import FunctionCall
from jobs.stream.delta import Delta, join
from jobs.stream.entries import Entry

A = TokenLogprob(token="a", logprob=-1.0, bytes=[97])
B = TokenLogprob(token="b", logprob=-2.0, top_logprobs=[TopLogprob(token="c", logprob=-0.5)])
CALL = ToolCallDelta(index=1, id="call_1", function=FunctionCall(name="f", arguments="{}"))


@pytest.mark.parametrize(
    ("delta", "names"),
    [
        (Delta(0), {"i"}),
        (Delta(1, "text"), {"i", "c"}),
        (Delta(0, reasoning="hm"), {"i", "r"}),
        (Delta(0, logprobs=(A, B)), {"i", "l"}),
        (Delta(0, finish_reason="length"), {"i", "f"}),
        (Delta(0, tool_calls=(CALL,)), {"i", "t"}),
        (Delta(0, token_ids=(7, 8)), {"i", "k"}),
        (Delta(0, prompt_token_ids=(1, 2)), {"i", "p"}),
        (
            Delta(3, "x", "y", (A,), "stop", (CALL,), (7,), (1,)),
            {"i", "c", "r", "l", "f", "t", "k", "p"},
        ),
    ],
)
def test_a_delta_survives_its_wire_form_which_omits_empty_fields(delta, names):
    wire = json.loads(json.dumps(delta.to_wire()))
    assert wire.keys() == names
    assert Delta.from_wire(wire) == delta


def test_unknown_wire_keys_are_ignored():
    assert Delta.from_wire({"i": 0, "c": "x", "later": 1}) == Delta(0, "x")


def test_join_concatenates_each_choice_and_orders_by_choice():
    joined = join(
        [
            Delta(1, "x", logprobs=(A,)),
            Delta(0, reasoning="h"),
            Delta(1, "y", logprobs=(B,), finish_reason="stop"),
            Delta(0, "a", reasoning="m"),
        ]
    )
    assert joined == (Delta(0, "a", "hm"), Delta(1, "xy", "", (A, B), "stop"))


def test_join_keeps_a_finish_reason_that_is_followed_by_text():
    assert join([Delta(0, "x", finish_reason="stop"), Delta(0, "y")]) == (
        Delta(0, "xy", finish_reason="stop"),
    )


def test_join_of_nothing_is_empty():
    assert join([]) == ()


def test_an_entry_survives_its_wire_form():
    entry = Entry("job", 2, 7, (Delta(0, "ü \ud800"), Delta(1, finish_reason="stop")))
    text = entry.payload()
    text.encode()  # a lone surrogate is escaped
    assert Entry.from_wire("job", entry.id, json.loads(text)) == entry


def test_the_end_entry_has_no_deltas():
    entry = Entry.from_wire("job", f"1-{2**53 - 1}", {"end": "stop"})
    assert entry.is_end
    assert entry.deltas == ()
