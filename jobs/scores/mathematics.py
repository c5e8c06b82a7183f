"""The metric math: answer and target are the same number, set, interval or expression."""

from __future__ import annotations

import logging

from jobs.errors import invalid
from jobs.scores.outcome import Outcome, Row, verdict
from jobs.scores.targets import references


class Math:
    """1 if the answer is equivalent to an accepted answer, by math-verify, which finds the answer
    in its text. Its own time limits use signals and are off: the process has one."""

    def __init__(self, argument: str | None) -> None:
        import math_verify

        if argument is not None:
            raise invalid("math takes no argument", "metric")
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the limits
        self._library = math_verify

    def score(self, row: Row) -> Outcome:
        answer = self._parsed(row["text"])
        shown = str(answer[-1]) if answer else None
        for target in references(row):
            expected = self._parsed(target) or self._parsed(f"${target}$")
            if not expected:
                raise ValueError(f"the target {target[:40]!r} is no mathematical expression")
            if self._library.verify(expected, answer, timeout_seconds=None, raise_on_error=True):
                return verdict(True, shown)
        return verdict(False, shown)

    def _parsed(self, text: str) -> list[object]:
        found: list[object] = self._library.parse(text, parsing_timeout=None, raise_on_error=True)
        return found
