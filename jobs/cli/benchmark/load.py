"""The load of a benchmark: its requests, and when each is sent."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.cli.failures import Failure, WrongInput

if TYPE_CHECKING:
    from jobs import ChatRequest

CountTokens = Callable[["ChatRequest"], int]

# Short, common words, which most vocabularies have as one token each.
COMMON = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home water
room mother area money story fact month lot right study book eye job word business issue side kind
head house service friend father power hour game line end member law car city community name
"""
WORDS = COMMON.split()


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and the times at which they are due: seconds after the begin, in their order.
    max_concurrency: a request that is due waits while so many have not ended."""

    requests: Sequence[ChatRequest]
    due: Sequence[float]
    max_concurrency: int | None


def due_times(count: int, rate: float, seed: int) -> list[float]:
    """The arrivals of a Poisson process with `rate` requests per second; all at once if that is
    infinite. The first one is at 0."""
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(f"arrivals {seed}")
    gaps = (draw.expovariate(rate) for _ in range(count - 1))
    return [*accumulate(gaps, initial=0.0)]


def synthetic(
    model: str, count: int, input_len: int, output_len: int, seed: int, count_tokens: CountTokens
) -> list[ChatRequest]:
    """Requests of random words: each has about `input_len` tokens with those of the chat template,
    and an answer of `output_len`. `count_tokens`: of a prompt, by the model. Raises JobError."""
    words = _words_for(model, input_len, count_tokens)
    return [
        _request(model, _text(f"{seed} {number}", words), output_len) for number in range(count)
    ]


def from_data_set(path: Path, model: str, count: int, output_len: int | None) -> list[ChatRequest]:
    """The requests of the first rows of a data set. `output_len`: tokens of all answers, instead
    of what the rows say. Raises WrongInput."""
    from jobs.data_sets.conventions import with_conventions
    from jobs.data_sets.data_set import DataSet
    from jobs.data_sets.files import data_files, readable_again
    from jobs.data_sets.requests import Overrides
    from jobs.data_sets.source import ErrorRow, RequestRow
    from jobs.errors import InvalidRequest

    fields = {} if output_len is None else _lengths(output_len)
    overrides = Overrides(model, fields=fields, ignore_unknown=True)
    requests: list[Any] = []
    try:
        with readable_again(path) as readable:
            files = data_files(readable, None)
            overrides = with_conventions(overrides, files)
            with DataSet(files, overrides, limit=count) as source:
                source.check()
                for row in source.read(lambda _: True):
                    if isinstance(row, ErrorRow):
                        raise WrongInput(f"{path}: {row.place}: {row.error.message}")
                    assert isinstance(row, RequestRow)
                    requests.append(row.request)
    except InvalidRequest as error:
        raise WrongInput(f"{path}: {error.message}") from None
    return requests


def probe(request: ChatRequest) -> ChatRequest:
    """The request with an answer of one token."""
    changed = {"max_tokens": 1, "max_completion_tokens": None, "min_tokens": None}
    return request.model_copy(update=changed)


def _words_for(model: str, input_len: int, count_tokens: CountTokens) -> int:
    """The number of words of a prompt with `input_len` tokens. The model counts the tokens of all
    words, once and twice: the difference is their mean, and what is left are those of the chat
    template."""
    once, twice = (
        count_tokens(_request(model, " ".join(WORDS * times), output_len=1)) for times in (1, 2)
    )
    per_word, rest = (twice - once) / len(WORDS), 2 * once - twice
    words = round((input_len - rest) / per_word) if per_word > 0 else 1
    if words < 1:
        raise Failure(
            f"--input-len {input_len} is too short: the chat template of {model} and one word have "
            f"about {math.ceil(rest + per_word)} tokens"
        )
    return words


def _text(seed: str, words: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


def _lengths(output_len: int) -> dict[str, Any]:
    return {"max_tokens": output_len, "ignore_eos": True}


def _request(model: str, text: str, output_len: int) -> ChatRequest:
    from jobs import ChatRequest

    messages = [{"role": "user", "content": text}]
    return ChatRequest.parse({"model": model, "messages": messages, **_lengths(output_len)})
