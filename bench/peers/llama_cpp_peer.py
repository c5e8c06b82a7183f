"""llama.cpp through llama-cpp-python, as a child process; see protocol.py.

{"turn": [token id, …], "tokens": n} generates n tokens after one prompt and keeps the state of what
the turn before it had in common, as llama.cpp's server does; the reply is {"seconds": s, "answer":
[token id, …]} with the time to the first token. {"load": true} reads the file once more; the reply
is {"seconds": s}.
"""

from __future__ import annotations

from typing import Any

import llama_cpp

from bench.peers.low_level import LowLevel
from bench.peers.protocol import Answer, run

QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)


def start(path: str, threads: int) -> tuple[str, dict[str, Answer]]:
    llama_cpp.llama_log_set(QUIET, None)
    model = LowLevel(llama_cpp, path, threads)

    def turn(asked: dict[str, Any]) -> dict[str, Any]:
        seconds, answer = model.turn(asked["turn"], asked["tokens"])
        return {"seconds": seconds, "answer": answer}

    answers = {**model.answers, "turn": turn, "load": lambda asked: {"seconds": model.load()}}
    return llama_cpp.__version__, answers


if __name__ == "__main__":
    run(start)
