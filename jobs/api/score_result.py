"""The answer to a scoring request: one `ScoredItem` for each of its items, in their order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Self

from jobs.api.answer import FinishReason, Usage
from jobs.api.wire import Output
from jobs.errors import JobError

Normalization = Literal["none", "tokens", "bytes"]

LEAST_BYTES_OF_LOGPROB = len("0.0,")


class ContinuationScore(Output):
    """The log-likelihood of one continuation. Logarithms are natural ones."""

    logprob_sum: float
    is_greedy: bool  # each token was the most probable one
    tokens: int  # that were scored
    bytes: int  # of the continuation as UTF-8, without the delimiter of its item
    token_ids: list[int]
    prompt_tokens: int
    token_logprobs: list[float] | None = None
    cached_tokens: int = 0  # of the prompt, how many were not computed
    truncated_tokens: int = 0  # cut from the left of the prompt

    @property
    def per_token(self) -> float:
        """logprob_sum divided by the number of tokens."""
        return self.logprob_sum / self.tokens

    @property
    def per_byte(self) -> float:
        """logprob_sum divided by the number of bytes."""
        return self.logprob_sum / max(1, self.bytes)

    def normalized(self, by: Normalization) -> float:
        """The score that a choice compares."""
        return {"none": self.logprob_sum, "tokens": self.per_token, "bytes": self.per_byte}[by]


def best(scores: Sequence[ContinuationScore], by: Normalization) -> int:
    """Index of the highest score, the first one of equal ones."""
    return max(range(len(scores)), key=lambda number: scores[number].normalized(by))


class TextScore(Output):
    """The log-likelihood of a text."""

    logprob_sum: float
    tokens: int  # that were scored
    words: int  # as white space separates them
    bytes: int  # of the text as UTF-8
    windows: int
    token_logprobs: list[float] | None = None

    @property
    def token_perplexity(self) -> float:
        return math.exp(-self.logprob_sum / self.tokens)

    @property
    def word_perplexity(self) -> float:
        return math.exp(-self.logprob_sum / self.words)

    @property
    def byte_perplexity(self) -> float:
        return math.exp(-self.logprob_sum / max(1, self.bytes))

    @property
    def bits_per_byte(self) -> float:
        return -self.logprob_sum / max(1, self.bytes) / math.log(2)


class ScoredItem(Output):
    """The result of one item: an error, or scores.

    continuations   of a loglikelihood or choice, in the order of the request
    picked          of a choice: index of the one with the highest score, as `normalize` says
    text            of a perplexity
    """

    type: str | None = None
    custom_id: str | None = None
    error: dict[str, Any] | None = None  # of JobError
    continuations: list[ContinuationScore] | None = None
    picked: int | None = None
    text: TextScore | None = None

    @property
    def failure(self) -> JobError | None:
        """Its error as an exception."""
        return None if self.error is None else JobError.from_dict(self.error)


class ScoreResult(Output):
    """The complete answer to a scoring request."""

    object: Literal["score"] = "score"
    created: int  # seconds since the epoch
    model: str
    items: list[ScoredItem]
    usage: Usage | None = None
    system_fingerprint: str | None = None

    @property
    def finish_reason(self) -> FinishReason:
        return "stop"

    def least_detail_bytes(self) -> int:
        """Bytes that its log-probabilities have as JSON, at least."""
        return LEAST_BYTES_OF_LOGPROB * sum(
            len(scored.token_logprobs or ()) for scored in self._scored()
        )

    def without_details(self) -> Self:
        """The answer without the log-probabilities of its tokens."""
        items = [
            item.model_copy(
                update={
                    "continuations": item.continuations
                    and [_without_logprobs(one) for one in item.continuations],
                    "text": item.text and _without_logprobs(item.text),
                }
            )
            for item in self.items
        ]
        return self.model_copy(update={"items": items})

    def _scored(self) -> list[ContinuationScore | TextScore]:
        continuations = [one for item in self.items for one in item.continuations or ()]
        return [*continuations, *(item.text for item in self.items if item.text is not None)]


def _without_logprobs(score: Any) -> Any:
    return score.model_copy(update={"token_logprobs": None})
