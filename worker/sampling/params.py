"""Resolves the sampling options of a request: all defaults filled in, limits checked."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from jobs.api.sampling import Sampling
from jobs.errors import invalid
from jobs.sizes import counted
from worker.backend import TooLong
from worker.checkpoint.config import GenerationDefaults
from worker.constraints.constraint import Constraint
from worker.constraints.thinking_budget import FIELD

GREEDY_BELOW = 1e-5  # temperature, as vLLM; logits divided by much less are not finite
REPETITION_PENALTIES = 0.01, 100.0  # the range of requests; a model's default is clamped to it
REPETITION_WINDOW = 64  # tokens that repetition_penalty covers, as llama.cpp's repeat_last_n


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The value of each sampling option; a disabled option has its neutral value."""

    temperature: float
    top_p: float
    top_k: int  # 0: off
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop_strings: tuple[str, ...]
    stop_ids: frozenset[int]  # tokens that end the completion
    max_tokens: int
    min_tokens: int
    logprobs: bool
    top_logprobs: int
    n: int
    allowed_ids: tuple[int, ...] | None = None  # all other tokens are excluded; None: no limit
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # the token sequences of bad_words
    include_stop: bool = False  # keep the stop string or the stop token's text
    skip_special: bool = True  # leave special tokens out of the text
    constraint: Constraint | None = None  # of the tokens; None: any text

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def as_sampling(self) -> Sampling:
        """The options as a wire object, for results."""
        budget = None if self.constraint is None else self.constraint.budget
        # Not validated: a model's own defaults may be outside the range that requests allow.
        return Sampling.model_construct(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={str(key): value for key, value in self.logit_bias.items()} or None,
            seed=self.seed,
            stop=list(self.stop_strings) or None,
            stop_token_ids=sorted(self.stop_ids),
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            n=self.n,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else None,
            # Only where they differ from their defaults, so that rows stay as short as they were.
            allowed_token_ids=None if self.allowed_ids is None else list(self.allowed_ids),
            bad_words=list(self.bad_words) or None,
            include_stop_str_in_output=self.include_stop or None,
            skip_special_tokens=None if self.skip_special else False,
            thinking_token_budget=None if budget is None else budget.most,
        )


def resolve_params(
    sampling: Sampling,
    defaults: GenerationDefaults,
    *,
    prompt_length: int,
    context_length: int,
    vocab_size: int,
    bad_word_ids: Sequence[Sequence[int]] = (),
    special_stops: Set[int] = frozenset(),
    constraint: Constraint | None = None,
) -> SamplingParams:
    """Fill in the model's defaults, then OpenAI's.

    `bad_word_ids`: the token sequences that write `sampling.bad_words`. `special_stops`: the
    special tokens whose texts are stop strings. Raises TooLong for a
    prompt that leaves no room in the context for min_tokens, or for one token, and JobError for ids
    outside the vocabulary and for limits that may leave no token to generate.
    """
    room = context_length - prompt_length
    if room < 1:
        raise TooLong(
            f"the prompt has {counted(prompt_length, 'token')} and the context holds "
            f"{context_length}: shorten the messages or use a model with a longer context",
            "messages",
            prompt_length + 1,
        )

    def pick(name: str, fallback: float) -> float:
        given = getattr(sampling, name)
        if given is None:
            given = getattr(defaults, name, None)
        return fallback if given is None else given

    thinks = constraint is not None and constraint.budget is not None
    if sampling.thinking_token_budget is not None and not thinks:
        raise invalid(f"{FIELD}: the prompt is no chat, so no reasoning is known: remove it", FIELD)
    stop_ids = {*(sampling.stop_token_ids or ()), *special_stops}
    if not sampling.ignore_eos:
        stop_ids |= set(defaults.eos_token_ids)
    bias = {int(key): value for key, value in (sampling.logit_bias or {}).items()}
    for field, ids in (
        ("logit_bias", bias),
        ("stop_token_ids", sampling.stop_token_ids or ()),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
    ):
        outside = [i for i in ids if i >= vocab_size]
        if outside:
            raise invalid(
                f"{field}: the vocabulary has {vocab_size} tokens, got id {outside[0]}",
                field,
            )
    least, most = REPETITION_PENALTIES
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    if (sampling.min_tokens or 0) > max_tokens:
        raise TooLong(
            f"min_tokens is {sampling.min_tokens}, and the prompt of "
            f"{counted(prompt_length, 'token')} leaves {room} of the context of {context_length}: "
            "ask for fewer, shorten the messages or use a model with a longer context",
            "min_tokens",
            prompt_length + (sampling.min_tokens or 0),
        )
    blocked = {ids[-1] for ids in bad_word_ids} | (stop_ids if sampling.min_tokens else set())
    allowed = set(sampling.allowed_token_ids or ())
    if allowed <= blocked if allowed else len(blocked) >= vocab_size:
        raise invalid(
            "allowed_token_ids, bad_words and min_tokens may leave no token to generate: allow "
            "further tokens",
            "allowed_token_ids" if allowed else "bad_words",
        )
    return SamplingParams(
        temperature=pick("temperature", 1.0),
        top_p=pick("top_p", 1.0),
        top_k=max(0, int(pick("top_k", 0))),
        min_p=pick("min_p", 0.0),
        repetition_penalty=min(max(pick("repetition_penalty", 1.0), least), most),
        presence_penalty=sampling.presence_penalty or 0.0,
        frequency_penalty=sampling.frequency_penalty or 0.0,
        logit_bias=bias,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        stop_strings=tuple(sampling.stop_strings),
        stop_ids=frozenset(stop_ids),
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens or 0,
        logprobs=bool(sampling.logprobs),
        top_logprobs=sampling.top_logprobs or 0,
        n=sampling.n or 1,
        allowed_ids=tuple(sorted(allowed)) or None,
        bad_words=tuple(sampling.bad_words or ()),
        bad_word_ids=tuple(map(tuple, bad_word_ids)),
        include_stop=bool(sampling.include_stop_str_in_output),
        skip_special=sampling.skip_special_tokens is not False,
        constraint=constraint,
    )
