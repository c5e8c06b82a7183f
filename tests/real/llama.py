"""llama.cpp's answers: `python llama.py TASKS ANSWERS`, in an environment that has llama-cpp-python
and nothing else of this project.

TASKS is JSON: `file`; `texts`, whose token ids are wanted; `windows`, token ids whose mean negative
log-likelihood is wanted; `prompts`, token ids that are continued greedily by `count` tokens.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from llama_cpp import Llama

CONTEXT = 1024


def mean_loss(model: Llama, window: list[int]) -> float:
    model.reset()
    model.eval(window)
    logits = model.scores[: len(window) - 1].astype(np.float64)
    greatest = logits.max(axis=1)
    sums = np.log(np.exp(logits - greatest[:, None]).sum(axis=1)) + greatest
    chosen = logits[np.arange(len(logits)), window[1:]]
    return float((sums - chosen).mean())


def greedy(model: Llama, prompt: list[int], count: int) -> list[int]:
    model.reset()
    model.eval(prompt)
    tokens: list[int] = []
    while True:
        tokens.append(int(model.scores[model.n_tokens - 1].argmax()))
        if len(tokens) == count:
            return tokens
        model.eval(tokens[-1:])


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        tasks = json.load(file)
    model = Llama(
        tasks["file"],
        verbose=False,
        n_threads=2,
        n_gpu_layers=0,
        n_ctx=CONTEXT,
        n_batch=CONTEXT,
        logits_all=True,
    )
    answers = {
        "texts": [
            model.tokenize(text.encode(), add_bos=False, special=True) for text in tasks["texts"]
        ],
        "losses": [mean_loss(model, window) for window in tasks["windows"]],
        "greedy": [greedy(model, prompt, tasks["count"]) for prompt in tasks["prompts"]],
    }
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
