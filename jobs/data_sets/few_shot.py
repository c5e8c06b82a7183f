"""Examples that are put before the prompt of each row: questions with their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.api.message import Message
from jobs.data_sets.requests import text_of
from jobs.errors import invalid
from jobs.sizes import counted

SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its expected answer."""

    prompt: Sequence[Message]
    answer: Message


class Shots:
    """The first `count` of some examples. For a row with the prompt of one of them, that one is
    replaced by the next: it would tell the answer."""

    def __init__(self, examples: Sequence[Example], count: int) -> None:
        self._examples, self._count = examples, count
        texts = [
            json.dumps(message.to_dict())
            for example in examples
            for message in (*example.prompt, example.answer)
        ]
        self.size = sum(map(len, texts))  # bytes as JSON, at most

    def __len__(self) -> int:
        return len(self._examples)

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


class Examples:
    """The examples of a run: `count` for each row, the same for all rows, or those with the row's
    value in the column `by`."""

    def __init__(
        self,
        file: str,
        groups: Mapping[str, Sequence[Example]],
        count: int,
        content: str,
        by: str | None = None,
    ) -> None:
        """`file`: for people. `groups`: the examples by their `group_of`. `content`: a digest of
        the file."""
        self.by = by
        self._file, self._count, self._content = file, count, content
        self._groups = {group: Shots(examples, count) for group, examples in groups.items()}

    def configuration(self) -> dict[str, Any]:
        """The part that they have in the configuration of a run."""
        by = {} if self.by is None else {"by": self.by}
        return {"content": self._content, "count": self._count, **by}

    def of(self, value: Any) -> Shots:
        """The examples of a row with a value in the column `by`. Raises InvalidRequest if there are
        too few."""
        found = self._groups.get(group_of(value), Shots((), self._count))
        if len(found) >= self._count:
            return found
        where = "" if self.by is None else f" with {self.by} {group_of(value)[:40]!r}"
        raise invalid(
            f"{self._file} has {counted(len(found), 'row')}{where}, and {self._count} are wanted"
        )


def group_of(value: Any) -> str:
    """What examples and rows of one group have in common: the text of a value."""
    return "" if value is None else str(text_of(value))
