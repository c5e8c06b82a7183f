"""Sampling parameters as a request gives them to the sampler."""

from __future__ import annotations

from jobs.api.sampling import Sampling
from worker.checkpoint.config import GenerationDefaults
from worker.sampling.params import SamplingParams, resolve_params


def resolved(vocab_size: int, *bad: list[int], **fields: object) -> SamplingParams:
    """The parameters of a request with these fields: its prompt has three tokens, and token 2 ends
    a sequence. `bad`: the token ids of its bad words."""
    return resolve_params(
        Sampling(**fields),
        GenerationDefaults(eos_token_ids=frozenset({2})),
        prompt_length=3,
        context_length=1000,
        vocab_size=vocab_size,
        bad_word_ids=bad,
    )
