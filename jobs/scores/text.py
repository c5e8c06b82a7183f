"""Metrics that compare an answer with its target as text: exact, contains, regex, number, edit and
choice (of a letter)."""

from __future__ import annotations

import re
import string
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation

from jobs.errors import invalid
from jobs.scores.outcome import Outcome, Row, verdict
from jobs.scores.targets import references, target_of

NORMALISATIONS = ("case", "punctuation", "articles", "space")
ALL = "normalize"
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b", re.IGNORECASE)

# A sign counts unless it follows a number or a word; commas separate thousands.
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+\u2212]\$?)?"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
)
# Of any exponent: a number that Decimal can't hold is infinite, or 0, and no error.
_NUMBERS = Context(Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
_NOT_DECIMAL = str.maketrans({",": "", "$": "", "\u2212": "-"})

_LETTER = re.compile(r"\W*([A-Z])\W*")
# Where answers name their choice, the most explicit form first; of several, the last one counts.
_NAMED = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?i:answer|choice|option)(?i:\s+is)?\s*:?\s*(?:\*\*|\\boxed\{)?\(?([A-Z])\b(?!['\u2019])",
        r"\\boxed\{\(?(?:\\text\{)?\(?([A-Z])\b",
        r"\(([A-Z])\)",
        r"(?m:^)\s*([A-Z])[).:](?!\w)",
    )
)


class Exact:
    """1 if the answer equals an accepted answer, without white space at its ends."""

    def __init__(self, ignored: str | None) -> None:
        self._ignored = ignored_differences(ignored)

    def score(self, row: Row) -> Outcome:
        answer = normalised(row["text"], self._ignored)
        accepted = {normalised(one, self._ignored) for one in (target_of(row), *references(row))}
        return verdict(answer in accepted, answer)


class Contains:
    """1 if an accepted answer is a part of the answer."""

    def __init__(self, ignored: str | None) -> None:
        self._ignored = ignored_differences(ignored)

    def score(self, row: Row) -> Outcome:
        answer = normalised(row["text"], self._ignored)
        accepted = [normalised(one, self._ignored) for one in (target_of(row), *references(row))]
        return verdict(any(one in answer for one in accepted))


class Regex:
    """1 if the pattern is found; with a group in it, if the group of the last match is an accepted
    answer."""

    def __init__(self, pattern: str | None) -> None:
        if not pattern:
            raise invalid("regex needs a pattern: --metric 'regex:PATTERN'", "metric")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise invalid(
                f"{pattern!r} is not a valid regular expression: {error}", "metric"
            ) from None

    def score(self, row: Row) -> Outcome:
        if not self._pattern.groups:
            found = self._pattern.search(row["text"])
            return verdict(found is not None, found and found[0])
        accepted = {one.strip() for one in references(row)}
        answer = None
        for match in self._pattern.finditer(row["text"]):
            answer = match[1]
        answer = None if answer is None else answer.strip()
        return verdict(answer in accepted, answer)


class Number:
    """1 if the last number of the answer is the last number of the target."""

    def __init__(self, tolerance: str | None) -> None:
        try:
            self._tolerance = Decimal(tolerance or 0)
        except InvalidOperation:
            self._tolerance = Decimal(-1)
        if not (self._tolerance.is_finite() and self._tolerance >= 0):
            raise invalid(
                f"{tolerance!r} is not a tolerance: --metric number:0.01 accepts a difference of "
                "0.01",
                "metric",
            )

    def score(self, row: Row) -> Outcome:
        target = target_of(row)
        expected, found = last_number(target), last_number(row["text"])
        if expected is None:
            raise ValueError(f"the target {target[:40]!r} holds no number")
        if found is None:
            return verdict(False, None, "no number in the answer")
        return verdict(found == expected or self._is_near(found, expected), str(found))

    def _is_near(self, found: Decimal, expected: Decimal) -> bool:
        difference = _NUMBERS.subtract(found, expected)
        return difference.is_finite() and difference.copy_abs() <= self._tolerance


class Edit:
    """The similarity of answer and target: 1 less their Levenshtein distance over the length of the
    longer one. Of several accepted answers, the most similar counts."""

    def __init__(self, ignored: str | None) -> None:
        from rapidfuzz.distance import Levenshtein

        self._similarity = Levenshtein.normalized_similarity
        self._ignored = ignored_differences(ignored)

    def score(self, row: Row) -> Outcome:
        answer = normalised(row["text"], self._ignored)
        accepted = (normalised(one, self._ignored) for one in references(row))
        return Outcome(max(self._similarity(answer, one) for one in accepted))


def letter_choice(text: str, target: str) -> Outcome:
    """1 if the answer names the letter of the target. Raises ValueError for a target that is no
    letter."""
    expected = _LETTER.fullmatch(target)
    if expected is None:
        raise ValueError(f"the target {target[:40]!r} is no letter of a choice, such as B or (B)")
    alone = _LETTER.fullmatch(text)
    letters = [alone[1]] if alone else []
    for pattern in _NAMED:
        letters = letters or pattern.findall(text)[-1:]
    return verdict(letters == [expected[1]], letters[0] if letters else None)


def ignored_differences(text: str | None) -> frozenset[str]:
    """The normalisations that the argument of a metric names. Raises InvalidRequest."""
    names = [] if text is None else [one.strip() for one in text.split(",")]
    unknown = [name for name in names if name not in (*NORMALISATIONS, ALL)]
    if unknown:
        raise invalid(
            f"unknown normalisation {unknown[0]!r}; known are {', '.join(NORMALISATIONS)}, and "
            f"{ALL} for all of them",
            "metric",
        )
    return frozenset(NORMALISATIONS if ALL in names else names)


def normalised(text: str, ignored: frozenset[str]) -> str:
    """A text without the differences that do not count. All four together are SQuAD's."""
    if "case" in ignored:
        text = text.lower()
    if "punctuation" in ignored:
        text = text.translate(_PUNCTUATION)
    if "articles" in ignored:
        text = _ARTICLES.sub(" ", text)
    if "space" in ignored:
        text = " ".join(text.split())
    return text.strip()


def last_number(text: str) -> Decimal | None:
    """The last number in a text, such as 1,234.5, -3 or 2e-4; None if it has none."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    last = found[-1].translate(_NOT_DECIMAL)
    try:
        return Decimal(last)
    except InvalidOperation:  # its exponent has too many digits
        return _NUMBERS.create_decimal(last)
