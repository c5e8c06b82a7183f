"""mistral.rs as a child process; see protocol.py. Its Python package takes text, not token ids, and
one request at a time: a batch fails."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mistralrs

from bench.peers.protocol import Answer, run


def start(path: str, threads: int) -> tuple[str, dict[str, Answer]]:
    file = Path(path)
    runner = mistralrs.Runner(
        mistralrs.Which.GGUF(quantized_model_id=str(file.parent), quantized_filename=file.name),
        prefix_cache_n=0,
    )

    def measure(asked: dict[str, Any]) -> dict[str, Any]:
        prompts, tokens = asked["prompts"], asked["tokens"]
        if len(prompts) > 1:
            raise RuntimeError("the Python package runs one request at a time")
        text = runner.detokenize_text(prompts[0], False)
        options = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
        request = mistralrs.CompletionRequest(prompt=text, model="default", **options)
        begin = time.perf_counter()
        usage = runner.send_completion_request(request).usage
        seconds = time.perf_counter() - begin
        if usage.completion_tokens != tokens:
            raise RuntimeError("mistral.rs generated another number of tokens than asked for")
        return {"seconds": seconds}

    return version("mistralrs"), {"prompts": measure}


if __name__ == "__main__":
    run(start)
