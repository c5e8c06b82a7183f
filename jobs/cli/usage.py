"""Counts the tokens and the seconds of a conversation's answers."""

from __future__ import annotations

from typing import NamedTuple

from jobs.sizes import counted


class TurnUsage(NamedTuple):
    """The tokens and seconds of answers."""

    answers: int = 0
    prompt: int = 0
    completion: int = 0
    seconds: float = 0.0

    def plus(self, other: TurnUsage) -> TurnUsage:
        return TurnUsage(
            self.answers + other.answers,
            self.prompt + other.prompt,
            self.completion + other.completion,
            self.seconds + other.seconds,
        )

    def __str__(self) -> str:
        speed = self.completion / self.seconds if self.seconds else 0.0
        return (
            f"{counted(self.answers, 'answer')}, {counted(self.prompt, 'token')} in, "
            f"{self.completion} out, {self.seconds:.2f} s, {speed:.1f} tokens/s"
        )
