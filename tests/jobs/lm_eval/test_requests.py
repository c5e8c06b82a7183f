"""Requests of lm-evaluation-harness as items and chat requests. tests/extras has the harness."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import ChatRequest, JobError
from jobs.api.score_request import MAX_CONTINUATIONS, parse_item
from jobs.lm_eval.requests import chat_context, generation_fields, grouped, prompt_fields

HISTORY = [
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Größe?"},
]


def fields(context: str = "2+2=", max_length: int | None = None, **arguments: Any) -> Any:
    """The request that is sent, checked."""
    given = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False, **arguments}
    found = generation_fields(context, given, max_length=max_length, seed=7)
    return ChatRequest(model="m", **found).to_dict()


def test_continuations_of_a_context_are_one_item_and_each_pair_is_scored_once() -> None:
    pairs = [("b", " x"), ("a", " x"), ("b", " y"), ("b", " x"), ("a b", "z")]
    groups = grouped(pairs)
    assert [one.context for one in groups] == ["a", "a b", "b"]
    assert groups[-1].numbers == {" x": [0, 3], " y": [2]}
    item = parse_item(groups[-1].item()).to_dict()
    assert (item["prompt"], item["continuations"]) == ("b", [" x", " y"])


def test_an_item_has_no_more_continuations_than_it_may() -> None:
    pairs = [("a", str(number)) for number in range(MAX_CONTINUATIONS + 1)]
    groups = grouped([*pairs, pairs[0]])
    assert [len(one.numbers) for one in groups] == [MAX_CONTINUATIONS, 1]
    assert groups[0].numbers["0"] == [0, MAX_CONTINUATIONS + 1]


def test_a_conversation_is_sent_as_messages() -> None:
    assert prompt_fields(chat_context(HISTORY, complete=True)) == {"messages": HISTORY}
    opened = [*HISTORY, {"role": "assistant", "content": "It is"}]
    assert prompt_fields(chat_context(opened, complete=False)) == {
        "messages": opened,
        "continue_final_message": True,
    }
    with pytest.raises(JobError, match="adds text to a context"):
        prompt_fields(chat_context(HISTORY, complete=True) + " Answer:")


def test_a_text_is_continued_without_the_chat_template() -> None:
    sent = fields(until=["\n", ""])
    assert sent["messages"] == [{"role": "user", "content": "2+2="}]
    assert sent["apply_chat_template"] is False
    assert (sent["max_tokens"], sent["temperature"], sent["stop"]) == (8, 0, ["\n"])
    assert sent["truncate_prompt_tokens"] == -1
    chat = fields(chat_context(HISTORY, complete=True))
    assert "apply_chat_template" not in chat
    assert chat["separate_reasoning"] is False  # as `hf` has it


def test_a_context_leaves_room_for_the_answer() -> None:
    assert fields(max_length=64)["truncate_prompt_tokens"] == 56
    with pytest.raises(JobError, match="max_gen_toks is 8, and max_length 8 leaves no token"):
        fields(max_length=8)


def test_requests_that_draw_have_a_seed_of_their_own() -> None:
    sent = fields(do_sample=True, temperature=0.5, top_p=0.9, num_beams=1)
    assert (sent["seed"], sent["temperature"], sent["top_p"]) == (7, 0.5, 0.9)
    assert "temperature" not in fields(do_sample=True)
    assert "seed" not in fields(do_sample=False, temperature=0.0)
    with pytest.raises(JobError, match="generation argument 'num_beams' is not known"):
        fields(num_beams=4)
