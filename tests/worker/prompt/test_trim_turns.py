"""truncate="oldest": whole turns are dropped, the system message stays."""

from __future__ import annotations

import pytest

from jobs import ChatRequest, JobError
from jobs.api.message import Message
from worker.prompt.trim_turns import build_newest, split_turns

SYSTEM: dict[str, object] = {"role": "system", "content": "sys"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def request(turns: int, **fields: object) -> ChatRequest:
    messages: list[dict[str, object]] = [SYSTEM]
    for number in range(turns):
        messages.append({"role": "user", "content": f"q{number}"})
        if number < turns - 1:
            messages.append({"role": "assistant", "content": None, "tool_calls": [CALL]})
            messages.append({"role": "tool", "tool_call_id": "c", "content": "r"})
            messages.append({"role": "assistant", "content": f"a{number}"})
    return ChatRequest(model="m", messages=messages, truncate="oldest", **fields)  # type: ignore[arg-type]


def build(request: ChatRequest) -> list[Message]:
    """A prompt with one token per message; the context holds 40."""
    if len(request.messages) >= 40:
        raise JobError("context_length_exceeded", f"{len(request.messages)} tokens")
    return request.messages


@pytest.mark.parametrize("turns", range(1, 40))
@pytest.mark.parametrize("max_tokens", [None, 1, 8, 39, 40, 100_000])
def test_as_few_turns_as_possible_are_dropped(turns: int, max_tokens: int | None) -> None:
    whole = request(turns, max_tokens=max_tokens)
    kept = build_newest(whole, build, len, 40)
    lead, all_turns = split_turns(whole.messages)
    assert [message.text for message in lead] == ["sys"] and len(all_turns) == turns
    room = 40 - min(max_tokens or 10, 20)  # max_tokens may be far more than there is
    fitting = [
        dropped
        for dropped in range(turns)
        if 1 + sum(len(turn) for turn in all_turns[dropped:]) <= room
    ]
    dropped = fitting[0] if fitting else turns - 1
    expected = [*lead, *(message for turn in all_turns[dropped:] for message in turn)]
    assert kept == expected


def test_a_last_turn_that_is_too_long_is_refused_with_the_numbers() -> None:
    messages = [{"role": "user", "content": "q"}] * 50
    alone = ChatRequest(model="m", messages=messages, truncate="oldest")
    with pytest.raises(JobError, match="50 tokens"):
        build_newest(alone, build, len, 40)


def test_other_errors_are_raised() -> None:
    def fail(request: ChatRequest) -> list[Message]:
        raise JobError("invalid_request", "a bad template")

    with pytest.raises(JobError, match="a bad template"):
        build_newest(request(3), fail, len, 40)
