"""Errors of an answer that has no next token in the form that its request asks for."""

from __future__ import annotations

from jobs.errors import JobError, invalid
from jobs.sizes import counted
from worker.constraints.matcher import Matcher
from worker.constraints.thinking_budget import FIELD
from worker.sampling.params import SamplingParams


def form_error(params: SamplingParams, fact: str, tokens: int) -> JobError:
    """The error of a grammar that can't be followed after so many tokens."""
    field = _field(params)
    return invalid(
        f"{field}: it is too complex after {counted(tokens, 'token')} of the answer ({fact}): give "
        "a simpler one",
        field,
    )


def no_token_left(params: SamplingParams, matcher: Matcher, tokens: int) -> JobError | None:
    """The error if the grammar allows no token after so many, or other options exclude those; None
    if there is another reason for which none was drawn."""
    field = _field(params) if matcher.forced is None else FIELD
    after = f"after {counted(tokens, 'token')} of the answer"
    if matcher.forced is None and matcher.stuck:
        return invalid(f"{field}: it allows no token {after}: give another one", field)
    names = [
        name
        for name, excludes in (
            ("bad_words", params.bad_word_ids),
            ("allowed_token_ids", params.allowed_ids is not None),
            ("min_tokens", params.min_tokens > tokens),
        )
        if excludes
    ]
    if not names:
        return None
    return invalid(
        f"{' with '.join(names)}: no token that {field} allows is left {after}: remove one of them",
        names[0],
    )


def _field(params: SamplingParams) -> str:
    assert params.constraint is not None
    return params.constraint.field
