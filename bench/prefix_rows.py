"""Rows of the prefix benchmarks, and how fast an engine computes their parts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from bench.harness import seconds
from jobs.api.sampling import Sampling
from worker import Engine
from worker.layers.batch import Batch

SYSTEM, USER, ANSWER = 400, (20, 200), (5, 120)  # tokens
BATCH = 16
ANSWERED = 60  # tokens of answers whose rate is measured

Rows = tuple[list[list[int]], list[Sampling]]


def answer_of(tokens: int) -> Sampling:
    return Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)


def make_rows(count: int, vocab: int, seed: int, *, shared: bool) -> Rows:
    """Prompts and the lengths of their answers."""
    draw = random.Random(seed)

    def text(length: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(length)]

    system = text(SYSTEM)
    prompts = [
        (system if shared else text(SYSTEM)) + text(draw.randint(*USER)) for _ in range(count)
    ]
    return prompts, [answer_of(draw.randint(*ANSWER)) for _ in range(count)]


def forward_seconds(engine: Engine, prompts: list[list[int]], tokens: int) -> list[float]:
    """The forward passes of a call that generates so many tokens after each prompt."""
    core: Any = engine._core
    model, found = core.runner.model, []

    def timed(batch: Batch, caches: Any) -> torch.Tensor:
        logits: list[torch.Tensor] = []
        found.append(seconds(lambda: logits.append(model(batch, caches))))
        return logits[0]

    core.runner.model = timed
    try:
        engine.generate(prompts, answer_of(tokens))
    finally:
        core.runner.model = model
    return found


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of forward passes that no reuse spares: for the common `beginning`, for a token of a
    row's `own` prompt after it, in steps full of such tokens, and for a token of an `answer` after
    prompts of these lengths, in a full batch."""

    beginning: float
    own: float
    answer: float

    @classmethod
    def measure(cls, on: Engine, seed: int) -> Rates:
        """Those of an engine that reuses."""
        prompts, _ = make_rows(BATCH, on.tokenizer.vocab_size, seed, shared=True)
        beginning = sum(forward_seconds(on, [prompts[0][:SYSTEM]], 1))
        own = sum(forward_seconds(on, prompts, 1)) / (sum(map(len, prompts)) - SYSTEM * BATCH)
        # All prompts are kept now: the first step admits every row.
        answers = forward_seconds(on, prompts, 1 + ANSWERED)[-ANSWERED:]
        return cls(beginning, own, sum(answers) / (BATCH * ANSWERED))

    def seconds(self, prompts: list[list[int]], answers: list[Sampling]) -> float:
        """For rows with a common beginning."""
        own = sum(map(len, prompts)) - SYSTEM * len(prompts)
        # The first token of an answer comes with its prompt.
        answered = sum((one.max_tokens or 0) - 1 for one in answers)
        return self.beginning + own * self.own + answered * self.answer
