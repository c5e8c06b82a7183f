"""Models and their drafts for tests, and requests of all kinds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Of the weights' size: many proposals of such a copy are right, and some are wrong.
NOISE = {"qwen3": 0.02, "gemma3_text": 0.05, "qwen3_5_text": 0.005, "qwen3_next": 0.005}

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}

# Of these a request has none to four.
OPTIONS: list[dict[str, Any]] = [
    {"stop": ["e", " r"]},
    {"n": 2},
    {"logprobs": True, "top_logprobs": 2},
    {"prompt_logprobs": 1},
    {"bad_words": ["the", "a"]},
    {"logit_bias": {"5": 4.0, "80": -100}},
    {"min_tokens": 6},
    {"tools": [TOOL]},
    {"ignore_eos": True},
]


def perturbed(folder: Path, to: Path) -> Path:
    """A copy of a model with noise on its weights."""
    copytree(folder, to)
    generator = torch.Generator().manual_seed(1)
    noise = NOISE[json.loads((to / "config.json").read_text())["model_type"]]
    tensors = load_file(to / "model.safetensors")
    for name, tensor in tensors.items():
        scale = noise * tensor.float().std() if tensor.numel() > 1 else 0.0
        tensors[name] = tensor + scale * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def mixed_requests(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Requests with every kind of sampling option, and several options together."""
    rng = random.Random(seed)
    words = ("red", "green", "blue", "rain", "one", "two", "three", "sun", "wind", "a", "the")
    requests = []
    for index in range(number):
        # Words that come again, so that looking them up finds something.
        text = " ".join(rng.choices(words, k=rng.randint(3, 25)))
        fields: dict[str, Any] = rng.choice(
            [
                {"temperature": 0},
                {"temperature": 0.7},
                {"temperature": 1.0, "top_p": 0.8},
                {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
                {"temperature": 0.3, "repetition_penalty": 1.2},
                {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
            ]
        )
        for option in rng.sample(OPTIONS, rng.choice([0, 1, 1, 2, 3, 4])):
            fields |= option
        requests.append(
            {
                "model": "m",
                "messages": [{"role": "user", "content": f"{text} {text}"}],
                "seed": index,
                "max_tokens": rng.choice([7, 12, 24] if "min_tokens" in fields else [1, 4, 12, 24]),
                **fields,
            }
        )
    return requests
