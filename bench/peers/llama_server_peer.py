"""llama.cpp's server with continuous batching, in a child process; see protocol.py.

xllamacpp runs the server of a newer llama.cpp than llama-cpp-python in the process, and passes
requests to it without HTTP. Its wheel is built for AVX2.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import version
from queue import SimpleQueue
from threading import Thread
from typing import Any

import xllamacpp

from bench.peers.closed_loop import threaded
from bench.peers.protocol import Answer, run

CONTEXT = 24_576  # positions that all sequences share: enough for bench.traffic
SEQUENCES = 32
QUIET = -1


def start(path: str, threads: int) -> tuple[str, dict[str, Answer]]:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.kv_unified = CONTEXT, SEQUENCES, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity, params.warmup = QUIET, False
    server = xllamacpp.Server(params)

    def request(prompt: list[int], tokens: int) -> dict[str, Any]:
        options = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
        return {"prompt": prompt, "max_tokens": tokens, **options}

    def stream(prompt: list[int], tokens: int) -> Iterator[object]:
        """Yields for each token but those that end no character."""
        chunks: SimpleQueue[dict[str, Any]] = SimpleQueue()
        asked = {**request(prompt, tokens), "stream": True}
        Thread(target=server.handle_completions, args=(asked, chunks.put)).start()
        while (chunk := chunks.get())["choices"][0]["finish_reason"] is None:
            yield chunk
        _check(chunk, tokens)

    def measure(asked: dict[str, Any]) -> dict[str, Any]:
        prompts, tokens = asked["prompts"], asked["tokens"]
        found: list[dict[str, Any]] = []

        def ask(prompt: list[int]) -> None:
            found.append(server.handle_completions(request(prompt, tokens)))

        asking = [Thread(target=ask, args=(prompt,)) for prompt in prompts]
        begin = time.perf_counter()
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        seconds = time.perf_counter() - begin
        for reply in found:
            _check(reply, tokens)
        return {"seconds": seconds}

    def serve(asked: dict[str, Any]) -> dict[str, Any]:
        return threaded(asked["serve"], asked["at_once"], stream)

    return version("xllamacpp"), {"prompts": measure, "serve": serve}


def _check(reply: dict[str, Any], tokens: int) -> None:
    if reply["usage"]["completion_tokens"] != tokens:
        raise RuntimeError("the server generated another number of tokens than asked for")


if __name__ == "__main__":
    run(start)
