"""Trains the demo model from scratch: tokenizer, weights, held-out data set, model card.

    python -m training.train_demo --out worker/demo

writes `<out>/model/` and `<out>/dataset.jsonl`, then scores the model with transformers and writes
the accuracy into the model card.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from training import evaluate, export
from training.card import write_card
from training.chat import render_prompt, render_reply
from training.model import Qwen3, Qwen3Config
from training.tasks import Example, held_out_examples, training_examples
from training.words import CAPITALS

POOL = 4096  # examples that are sorted by length together, to reduce padding
STEP = 16  # batches are padded to a multiple of this many tokens
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.05
WARMUP = 150
IGNORED = -100

Batch = tuple[Tensor, Tensor]  # ids and labels, both [rows, tokens]


def encode(tokenizer: Tokenizer, examples: list[Example]) -> list[tuple[list[int], int]]:
    """Token ids of each example, and the length of the reply at their end."""
    prompts = [render_prompt(e.messages, e.thinking) for e in examples]
    replies = [render_reply(e.reasoning, e.answer, e.thinking) for e in examples]
    encoded = []
    for prompt, reply in zip(
        tokenizer.encode_batch(prompts, add_special_tokens=False),
        tokenizer.encode_batch(replies, add_special_tokens=False),
        strict=True,
    ):
        encoded.append((prompt.ids + reply.ids, len(reply.ids)))
    return encoded


def batches(tokenizer: Tokenizer, rng: random.Random, tokens: int) -> Iterator[Batch]:
    """Yields batches of about `tokens` tokens, each of examples of similar length, without end."""
    source = training_examples(rng)
    while True:
        pool = sorted(encode(tokenizer, list(islice(source, POOL))), key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], int]]] = [[]]
        for row in pool:
            width = -(-len(row[0]) // STEP) * STEP
            if (len(groups[-1]) + 1) * width > tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            width = -(-max(len(ids) for ids, _ in group) // STEP) * STEP
            ids_out = torch.zeros(len(group), width, dtype=torch.long)
            labels = torch.full((len(group), width), IGNORED)
            for i, (ids, reply_length) in enumerate(group):
                ids_out[i, : len(ids)] = torch.tensor(ids)
                labels[i, len(ids) - reply_length - 1 : len(ids) - 1] = ids_out[
                    i, len(ids) - reply_length : len(ids)
                ]
            yield ids_out, labels


def schedule(step: int, steps: int) -> float:
    """Learning rate as a fraction of its peak: linear warm-up, then cosine decay to zero."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))


def train(
    model: Qwen3,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    steps: int,
    tokens: int,
    lr: float,
    seed: int,
) -> None:
    """Run the training loop; writes the weights to the folder every thousand steps."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0}],
        lr=lr,
        betas=BETAS,
        fused=True,
    )
    source = batches(tokenizer, random.Random(seed), tokens)
    started, seen, losses = time.monotonic(), 0, []
    for step in range(steps):
        ids, labels = next(source)
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step, steps)
        wanted = (labels.flatten() != IGNORED).nonzero().squeeze(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids, wanted)
        loss = F.cross_entropy(logits.float(), labels.flatten()[wanted])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += ids.numel()
        losses.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == steps:
            elapsed = time.monotonic() - started
            left = elapsed / (step + 1) * (steps - step - 1)
            print(
                f"step {step + 1}/{steps} loss {sum(losses) / len(losses):.4f} "
                f"{seen / elapsed:.0f} tokens/s {elapsed:.0f} s, {left:.0f} s left",
                flush=True,
            )
            losses.clear()
        if (step + 1) % 1000 == 0 or step + 1 == steps:
            export.write_weights(folder, model.state_dict())


def write_dataset(path: Path, seed: int) -> None:
    """Write the held-out questions, one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for e in held_out_examples(seed):
            row = {"messages": list(e.messages), "target": e.answer, "task": e.task}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Output folder.")
@click.option("--steps", default=6500, show_default=True)
@click.option("--tokens", default=4096, show_default=True, help="Tokens per batch.")
@click.option("--lr", default=2e-3, show_default=True, help="Peak learning rate.")
@click.option("--seed", default=1, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(out: Path, steps: int, tokens: int, lr: float, seed: int, threads: int) -> None:
    """Train the demo model, write OUT/model and OUT/dataset.jsonl, print the accuracy."""
    torch.set_num_threads(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(seed)
    folder, dataset = out / "model", out / "dataset.jsonl"
    config = Qwen3Config()
    tokenizer = export.train_tokenizer(config.vocab_size, seed)
    model = Qwen3(config)
    export.write_texts(folder, config, tokenizer)
    export.write_weights(folder, model.state_dict())
    write_dataset(dataset, seed)
    size = sum(p.numel() for p in model.parameters())
    print(
        f"{size:,} parameters, {(folder / 'model.safetensors').stat().st_size:,} bytes", flush=True
    )
    started = time.monotonic()
    train(model, tokenizer, folder, steps=steps, tokens=tokens, lr=lr, seed=seed)
    minutes = (time.monotonic() - started) / 60
    table, _ = evaluate.accuracy(folder, evaluate.read_rows(dataset))
    write_card(
        folder,
        parameters=size / 1e6,
        capitals=len(CAPITALS),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        context=config.max_position_embeddings,
        vocab=config.vocab_size,
        steps=steps,
        tokens=tokens,
        lr=lr,
        seed=seed,
        minutes=minutes,
        table=evaluate.as_markdown(table),
    )
    print(f"trained in {minutes:.1f} minutes\n{evaluate.as_markdown(table)}")


if __name__ == "__main__":
    main()
