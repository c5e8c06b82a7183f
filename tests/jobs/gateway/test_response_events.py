"""The events of a response depend on its request and its answer alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jobs.api.answer import AssistantMessage, ChatCompletion, Choice
from jobs.gateway.responses.asked import Asked
from jobs.gateway.responses.events import Events
from tests.jobs.gateway.response_types import events_of, text_of

TEXTS = [
    "",
    " ",
    "one",
    " one two  three\n\n\tfour.",
    "x" * 100,
    " " * 100,
    "日本語のテキストには空白がない。" * 4,
    "aaaaaaaaaaaaaaa bbbbbbbbbbbbbbbb ccccccccccccccccc " * 3,
    "a\u00a0b\u3000c \u2028d 👍🏽 e\u0301" * 5,
]


def events(reasoning: str, content: str, cuts: random.Random | None) -> list[dict[str, Any]]:
    """The events of an answer, which arrives in random parts; in one part if `cuts` is None."""
    asked = Asked.read({"model": "m", "input": "x", "job": {"id": "j"}})
    made = Events(asked)
    found = made.begin()
    for name, text in (("reasoning", reasoning), ("content", content)):
        start = 0
        while start < len(text):
            size = len(text) if cuts is None else cuts.choice((1, 1, 2, 3, 8, 40))
            part = {"reasoning": "", "content": "", name: text[start : start + size]}
            found += made.add(**part)
            start += size
    message = AssistantMessage(content=content, reasoning_content=reasoning or None)
    choice = Choice(index=0, message=message, finish_reason="stop")
    found += made.end(ChatCompletion(id="c", created=1, model="m", choices=[choice]))
    return found


@pytest.mark.parametrize("content", TEXTS)
@pytest.mark.parametrize("reasoning", ["", *TEXTS[2:4]])
def test_the_parts_in_which_an_answer_comes_change_no_event(reasoning: str, content: str) -> None:
    whole = events(reasoning, content, None)
    assert text_of(events_of(whole)) == content
    created = [whole[0]["response"]["created_at"]]
    for seed in range(50):
        parts = events(reasoning, content, random.Random(seed))
        for one in parts:
            if "response" in one:
                one["response"]["created_at"] = created[0]
        assert parts == whole
    longest = max((len(one["delta"]) for one in whole if "delta" in one), default=0)
    assert longest <= 32
