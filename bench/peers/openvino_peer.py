"""OpenVINO GenAI with continuous batching, as a child process; see protocol.py.

The KV cache and all scheduling stay at the library's defaults, but for the number of tokens of one
step, which lets a whole batch prefill at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.peers.closed_loop import stepped
from bench.peers.protocol import Answer, run

CACHE_GIB = 4


def start(folder: str, threads: int) -> tuple[str, dict[str, Answer]]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_batched_tokens = 2048
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
    )

    def measure(asked: dict[str, Any]) -> dict[str, Any]:
        prompts = [_tensor(ids) for ids in asked["prompts"]]
        begin = time.perf_counter()
        results = pipeline.generate(prompts, [_options(asked["tokens"])] * len(prompts))
        seconds = time.perf_counter() - begin
        if any(len(result.m_generation_ids[0]) != asked["tokens"] for result in results):
            raise SystemExit("OpenVINO generated another number of tokens than asked for")
        return {"seconds": seconds}

    def serve(asked: dict[str, Any]) -> dict[str, Any]:
        handles: dict[int, Any] = {}

        def add(index: int, prompt: list[int], tokens: int) -> None:
            handles[index] = pipeline.add_request(index, _tensor(prompt), _options(tokens))

        def step() -> Iterator[tuple[int, int]]:
            pipeline.step()
            for index, handle in handles.items():
                if handle.can_read():
                    yield index, sum(len(one.generated_ids) for one in handle.read().values())

        return stepped(asked["serve"], asked["at_once"], add, step)

    return version("openvino-genai"), {"prompts": measure, "serve": serve}


def _tensor(ids: list[int]) -> Any:
    return openvino.Tensor(np.array([ids], dtype=np.int64))


def _options(tokens: int) -> Any:
    options = openvino_genai.GenerationConfig()
    options.max_new_tokens, options.ignore_eos, options.do_sample = tokens, True, False
    return options


if __name__ == "__main__":
    run(start)
