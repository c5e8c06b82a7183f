"""Drops the oldest turns of a conversation that is too long for the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from jobs.api.message import Message
from jobs.api.request import ChatRequest
from jobs.errors import JobError

P = TypeVar("P")

LEADING_ROLES = ("system", "developer")
ANSWER_SHARE = 4  # of the context, one part is left for an answer without max_tokens
MAX_ANSWER_SHARE = 2  # and one at most for one with max_tokens, which may exceed the context


def answer_room(max_tokens: int, context: int) -> int:
    """The tokens of the context that a shortened prompt leaves for the answer."""
    return min(max_tokens, context // MAX_ANSWER_SHARE)


def split_turns(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The leading system messages, and the turns: each begins with messages of the user, so that
    tool calls and their results stay together."""
    lead = 0
    while lead < len(messages) and messages[lead].role in LEADING_ROLES:
        lead += 1
    turns: list[list[Message]] = []
    for number, message in enumerate(messages[lead:], lead):
        begins = message.role == "user" and messages[number - 1].role != "user"
        if begins or not turns:
            turns.append([])
        turns[-1].append(message)
    return list(messages[:lead]), turns


def build_newest(
    request: ChatRequest,
    build: Callable[[ChatRequest], P],
    length: Callable[[P], int],
    context: int,
) -> P:
    """The prompt of the system messages and as many of the newest turns as leave room for the
    answer: max_tokens, but at most half of the context, or else a quarter of it. Raises JobError if
    the last turn alone is too long."""
    lead, turns = split_turns(request.messages)
    room = context - answer_room(request.max_tokens or context // ANSWER_SHARE, context)

    def without(dropped: int) -> P:
        kept = [message for turn in turns[dropped:] for message in turn]
        return build(request.model_copy(update={"messages": [*lead, *kept]}))

    def fits(dropped: int) -> P | None:
        try:
            prompt = without(dropped)
        except JobError as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        return prompt if length(prompt) <= room else None

    if (prompt := fits(0)) is not None:
        return prompt
    fewest, most = 1, max(0, len(turns) - 1)  # of turns to drop
    newest: P | None = None
    while fewest < most:
        middle = (fewest + most) // 2
        prompt = fits(middle)
        if prompt is None:
            fewest = middle + 1
        else:
            most, newest = middle, prompt
    return newest if newest is not None else without(most)
