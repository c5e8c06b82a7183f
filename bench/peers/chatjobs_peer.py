"""chatjobs' own engine as a child process, where all contestants run alone; see protocol.py."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch

from bench.peers.closed_loop import stepped
from bench.peers.protocol import Answer, run
from jobs.api.sampling import Sampling
from worker import Engine

MAX_BATCH = 32


def start(path: str, threads: int) -> tuple[str, dict[str, Answer]]:
    torch.set_num_threads(threads)
    engine = Engine.load(path, max_batch=MAX_BATCH)

    def measure(asked: dict[str, Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        engine.generate(asked["prompts"], _sampling(asked["tokens"]))
        return {"seconds": time.perf_counter() - begin}

    def serve(asked: dict[str, Any]) -> dict[str, Any]:
        came: deque[int] = deque()  # the index of a request for each of its tokens

        def add(index: int, prompt: list[int], count: int) -> None:
            params = engine._core.sampling_params(_sampling(count), prompt)
            sequence = engine._sequence(prompt, params, 0, lambda event: came.append(index))
            engine._core.add([sequence])

        def step() -> Iterator[tuple[int, int]]:
            engine.step()
            while came:
                yield came.popleft(), 1

        return stepped(asked["serve"], asked["at_once"], add, step)

    return version("chatjobs"), {"prompts": measure, "serve": serve}


def _sampling(tokens: int) -> Sampling:
    return Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)


if __name__ == "__main__":
    run(start)
