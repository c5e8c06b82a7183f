"""Log-likelihoods of several continuations of one prompt: rows per second.

    python -m bench.likelihood [--model demo] [--prompts 8] [--rounds 3]

Each prompt has 500 tokens of its own and four continuations of several tokens, in float32.
"shared": as one item of a scoring job, which computes the prompt once. "separate": as four items
that may not share the state of the prompt. "hf": lm-evaluation-harness's own model with the same
checkpoint and threads, in the environment of `make extras` (.extras/bin/python -m
bench.likelihood). The figures of all three are compared.
"""

from __future__ import annotations

import random
import secrets
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch

from bench.harness import alternate, median, report, seconds
from jobs.api.score_request import ScoreRequest
from jobs.api.score_result import ScoreResult
from worker import Engine
from worker.local.collect import CollectingSink
from worker.scoring.generation import start_scoring

PROMPT_TOKENS, CONTINUATIONS = 500, 4
WORDS = ["the", "dog", "sleeps", "near", "a", "river", "while", "seven", "birds", "count", "stones"]
SAME, SAME_AS_HF = 1e-4, 1e-3  # of a log-likelihood

Prompts = list[tuple[str, list[str]]]


def make_prompts(engine: Engine, count: int, seed: int) -> Prompts:
    draw, found = random.Random(seed), []
    for _ in range(count):
        words: list[str] = []
        while len(engine.tokenizer.encode(" ".join(words))) < PROMPT_TOKENS:
            words += draw.choices(WORDS, k=8)
        endings = [f" {' '.join(draw.choices(WORDS, k=5))}" for _ in range(CONTINUATIONS)]
        found.append((" ".join(words), endings))
    return found


class Ours:
    """Scoring requests in this process. No state of an earlier call is reused: each request has a
    cache_salt of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def shared(self, prompts: Prompts) -> list[float]:
        return self._score([prompts])

    def separate(self, prompts: Prompts) -> list[float]:
        rows = [
            [(prompt, [endings[number]]) for prompt, endings in prompts]
            for number in range(CONTINUATIONS)
        ]
        by_ending = self._score(rows)
        count = len(prompts)
        return [by_ending[n * count + p] for p in range(count) for n in range(CONTINUATIONS)]

    def _score(self, jobs: list[Prompts]) -> list[float]:
        sinks = []
        for items in jobs:
            request = ScoreRequest(
                model="m",
                items=[
                    {"type": "loglikelihood", "prompt": prompt, "continuations": endings}
                    for prompt, endings in items
                ],
                cache_salt=secrets.token_hex(8),
            )
            sinks.append(CollectingSink())
            for _ in start_scoring(self._engine._core, request, sinks[-1]):
                pass  # each item
        while self._engine.step():
            pass
        found = []
        for sink in sinks:
            outcome = sink.outcome
            assert outcome is not None and isinstance(outcome.result, ScoreResult), outcome
            for item in outcome.result.items:
                found += [one.logprob_sum for one in item.continuations or ()]
        return found


class Hf:
    """lm-evaluation-harness's model."""

    def __init__(self, path: str) -> None:
        from lm_eval.models.huggingface import HFLM

        self._model: Any = HFLM(pretrained=path, dtype="float32", device="cpu", batch_size=4)

    def score(self, prompts: Prompts) -> list[float]:
        from lm_eval.api.instance import Instance

        instances = [
            Instance("loglikelihood", {}, (prompt, one), 0)
            for prompt, endings in prompts
            for one in endings
        ]
        found = self._model.loglikelihood(instances, disable_tqdm=True)
        return [value for value, _ in found]


@click.command()
@click.option("--model", default="demo", show_default=True, help="demo, or a folder.")
@click.option("--prompts", "count", default=8, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--threads", default=None, type=int, help="[default: torch's]")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(model: str, count: int, rounds: int, threads: int | None, out: Path | None) -> None:
    """Measure rows per second."""
    if threads is not None:
        torch.set_num_threads(threads)
    engine = Engine.load(model, device="cpu", dtype="fp32", max_batch=16)
    ours = Ours(engine)
    ways = {"shared": ours.shared, "separate": ours.separate}
    if find_spec("lm_eval") is not None:
        ways["hf"] = Hf(str(Path("worker/demo/model")) if model == "demo" else model).score
    prompts = make_prompts(engine, count, seed=1)
    figures = {name: way(prompts) for name, way in ways.items()}
    apart = {
        name: max(abs(a - b) for a, b in zip(figures["shared"], found, strict=True))
        for name, found in figures.items()
    }
    assert apart["separate"] <= SAME and apart.get("hf", 0.0) <= SAME_AS_HF, apart

    def rate(name: str) -> float:
        given = make_prompts(engine, count, seed=random.randrange(1 << 30))
        return CONTINUATIONS * count / seconds(lambda: ways[name](given))

    found = alternate({name: partial(rate, name) for name in ways}, rounds)
    rates = {name: median(values) for name, values in found.items()}
    rows = [
        {
            "way": name,
            "rows / s": rates[name],
            "shared beside it": rates["shared"] / rates[name],
            "log-likelihoods differ by": apart[name],
        }
        for name in ways
    ]
    title = f"{CONTINUATIONS} continuations of {PROMPT_TOKENS} tokens"
    report(title, rows, "cpu", out)


if __name__ == "__main__":
    main()
