"""Traffic on a GPU in the manner of nano-vllm's benchmark: random lengths of prompts and answers,
all requests at once, at temperature 0.6. Ours, and transformers' continuous batching.

Lengths have the distribution of nano-vllm's, but seeds of our own: its run makes 133,966 tokens,
and our two turns 144,611 and 146,708.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from bench.harness import seconds
from jobs.api.sampling import Sampling
from jobs.errors import JobError
from worker import Engine
from worker.engine.sequence import Sequence, TokenEvent

REQUESTS, LONGEST, SHORTEST = 256, 1024, 100
TEMPERATURE = 0.6
VOCABULARY = 10_000
STOP_SECONDS = 20.0  # for transformers' thread to end


@dataclass(frozen=True)
class Traffic:
    """Prompts, and how many new tokens each one gets."""

    prompts: list[list[int]]
    lengths: list[int]

    @classmethod
    def random(cls, seed: str, *, tiny: bool) -> Traffic:
        """The same traffic for each contestant; prompts of other seeds have nothing in common."""
        rng = random.Random(seed)
        number, longest = (8, SHORTEST + 20) if tiny else (REQUESTS, LONGEST)
        vocabulary = 1000 if tiny else VOCABULARY
        prompts = [
            [rng.randint(0, vocabulary) for _ in range(rng.randint(SHORTEST, longest))]
            for _ in range(number)
        ]
        return cls(prompts, [rng.randint(SHORTEST, longest) for _ in prompts])

    @property
    def positions(self) -> float:
        """Positions of keys and values that are read, of all new tokens."""
        return sum(
            new * (len(prompt) + new / 2)
            for prompt, new in zip(self.prompts, self.lengths, strict=True)
        )


class Started(list[Sequence]):
    """Sequences that were added to an engine, and the error of the first one that has failed."""

    error: JobError | None = None

    def listen(self, event: TokenEvent) -> None:
        self.error = self.error or event.error


def start(engine: Engine, prompts: list[list[int]], options: list[Sampling]) -> Started:
    """Add sequences to the engine."""
    core, sequences = engine._core, Started()
    for prompt, one in zip(prompts, options, strict=True):
        params = core.sampling_params(one, prompt)
        sequences.append(engine._sequence(prompt, params, 0, sequences.listen))
    core.add(sequences)
    return sequences


def step_until_drawn(engine: Engine, sequences: Started, tokens: int) -> None:
    """Step until all sequences have drawn some tokens, and none has ended. Raises JobError if one
    ends: it failed, or others wait for the memory of its cache."""
    while not all(len(one.output_ids) >= tokens for one in sequences):
        engine.step()
        if any(one.ended for one in sequences):
            raise sequences.error or JobError(
                "out_of_memory", f"the cache has no room for {len(sequences)} sequences"
            )


def stop(engine: Engine, sequences: list[Sequence]) -> None:
    """Cancel sequences."""
    for one in sequences:
        one.cancel()
    engine.step()


def serve(engine: Engine, traffic: Traffic, limit: float) -> tuple[int, int, float]:
    """Tokens made, steps and seconds; ended after `limit` seconds. Raises JobError if a sequence
    fails."""
    options = [
        Sampling(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n, seed=n)
        for n in traffic.lengths
    ]
    engine.generate(traffic.prompts[:8], Sampling(temperature=TEMPERATURE, max_tokens=4))
    core = engine._core
    steps, made = core.steps, core.tokens_generated
    end = time.perf_counter() + limit

    def run() -> None:
        sequences = start(engine, traffic.prompts, options)
        while not all(one.ended for one in sequences) and time.perf_counter() < end:
            engine.step()
        failure = sequences.error  # stopped ones have an error, too
        stop(engine, sequences)
        if failure is not None:
            raise failure

    taken = seconds(run)
    return core.tokens_generated - made, core.steps - steps, taken


def serve_by_transformers(model: Any, traffic: Traffic, limit: float) -> float | None:
    """Tokens per second of continuous batching, after its warm-up; None if it takes longer than
    `limit` seconds, or fails. Its thread may not end: see `leave`."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        max_new_tokens=max(traffic.lengths),
        eos_token_id=-1,
    )
    made = ended = 0
    manager = model.init_continuous_batching(generation_config=config)
    manager.warmup()
    manager.start()
    try:
        begin = time.perf_counter()
        for prompt, length in zip(traffic.prompts, traffic.lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
        while ended < len(traffic.prompts):
            if time.perf_counter() - begin > limit:
                print(f"transformers: {ended} requests ended in {limit:g} s", flush=True)
                return None
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                print("transformers: continuous batching ended with an error", flush=True)
                return None
            if result is not None and result.is_finished():
                made, ended = made + len(result.generated_tokens), ended + 1
        return made / (time.perf_counter() - begin)
    finally:
        manager.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)


def leave(code: int) -> NoReturn:
    """End the process, for which Python would wait for threads that have not ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    if any(not one.daemon for one in threading.enumerate() if one is not threading.main_thread()):
        os._exit(code)
    sys.exit(code)
