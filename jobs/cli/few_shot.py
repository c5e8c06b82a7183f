"""Examples that are put before the prompt of each row: questions with their answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs.api.message import Message

SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its expected answer."""

    prompt: Sequence[Message]
    answer: Message


class Examples:
    """The first `count` of some examples. For a row with the prompt of one of them, that one is
    replaced by the next: it would tell the answer."""

    def __init__(self, examples: Sequence[Example], count: int, content: str) -> None:
        """`content`: a digest of their file."""
        self._examples, self._count, self._content = examples, count, content
        texts = [
            json.dumps(message.to_dict())
            for example in examples
            for message in (*example.prompt, example.answer)
        ]
        self.size = sum(map(len, texts))  # bytes as JSON, at most

    def configuration(self) -> dict[str, Any]:
        """The part that they have in the configuration of a run."""
        return {"content": self._content, "count": self._count}

    def before(self, messages: Sequence[Message]) -> list[Message]:
        """A conversation with the examples behind its system messages."""
        begin = next((n for n, one in enumerate(messages) if one.role not in SYSTEM), len(messages))
        system, prompt = list(messages[:begin]), list(messages[begin:])
        others = [one for one in self._examples if list(one.prompt) != prompt]
        shots = [
            message
            for example in others[: self._count]
            for message in (*example.prompt, example.answer)
        ]
        return [*system, *shots, *prompt]
