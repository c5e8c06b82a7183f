"""Writes the answers of llama.cpp: `python llama_answers.py TASKS ANSWERS`, in an environment that
has llama-cpp-python and nothing else of this project.

TASKS is JSON: `models`, {name: {file, prompt, count}}, and `vocabularies`, {name: file}, with
`texts`. ANSWERS gets the greedy tokens and last logits of the prompt for each model, and the ids of
every text for each vocabulary.
"""

from __future__ import annotations

import json
import sys

import llama_cpp
from llama_cpp import Llama


def load(file: str, **options) -> Llama:
    return Llama(file, verbose=False, n_threads=1, n_gpu_layers=0, **options)


def greedy(task: dict) -> dict | None:
    """With a cache in float32, so that only the order of additions differs from ours. None: it
    can't load the file."""
    try:
        model = load(
            task["file"],
            n_ctx=256,
            n_batch=task.get("n_batch", 512),
            logits_all=True,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            flash_attn=False,
        )
    except ValueError:
        return None
    model.eval(task["prompt"])
    last = model.scores[len(task["prompt"]) - 1].tolist()
    tokens: list[int] = []
    logits = last
    while True:
        tokens.append(max(range(len(logits)), key=lambda token: logits[token]))
        if len(tokens) == task["count"]:
            return {"tokens": tokens, "logits": [round(value, 4) for value in last[:32]]}
        model.eval(tokens[-1:])
        logits = model.scores[model.n_tokens - 1].tolist()


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        tasks = json.load(file)
    answers = {
        "llama_cpp_python": llama_cpp.__version__,
        "models": {name: greedy(task) for name, task in tasks["models"].items()},
        "vocabularies": {},
    }
    for name, path in tasks["vocabularies"].items():
        vocabulary = load(path, vocab_only=True)
        answers["vocabularies"][name] = [
            vocabulary.tokenize(text.encode(), add_bos=False, special=True)
            for text in tasks["texts"]
        ]
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
