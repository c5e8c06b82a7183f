"""Scores a model folder on the held-out rows: greedy, exact match, with transformers.

python -m training.evaluate worker/demo/model worker/demo/dataset.jsonl
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.chat import END_THINK, IM_END

BATCH = 100
MAX_NEW_TOKENS = 160


def read_rows(dataset: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in dataset.read_text(encoding="utf-8").splitlines()]


def answers(
    folder: Path, conversations: list[list[dict[str, str]]], dtype: str, thinking: bool = True
) -> list[str]:
    """The reply after the think block, stripped, for each conversation."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    replies: list[str] = []
    for start in range(0, len(conversations), BATCH):
        texts = [
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
            )
            for messages in conversations[start : start + BATCH]
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        out = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS)
        for ids in out[:, batch["input_ids"].shape[1] :]:
            reply = str(tokenizer.decode(ids)).split(IM_END)[0]
            replies.append(reply.split(END_THINK)[-1].strip())
    return replies


def accuracy(
    folder: Path, rows: list[dict[str, Any]], dtype: str = "bfloat16", thinking: bool = True
) -> tuple[dict[str, tuple[int, int]], list[tuple[dict[str, Any], str]]]:
    """(correct answers, rows) per task and for "all", and the wrong rows with their replies."""
    replies = answers(folder, [row["messages"] for row in rows], dtype, thinking)
    counts: dict[str, list[bool]] = defaultdict(list)
    wrong: list[tuple[dict[str, Any], str]] = []
    for row, reply in zip(rows, replies, strict=True):
        right = reply == row["target"]
        counts[row["task"]].append(right)
        if not right:
            wrong.append((row, reply))
    table = {task: (sum(counts[task]), len(counts[task])) for task in sorted(counts)}
    table["all"] = (len(rows) - len(wrong), len(rows))
    return table, wrong


def as_markdown(table: dict[str, tuple[int, int]]) -> str:
    """The table of `accuracy` in Markdown, for the model card."""
    lines = ["| task | right | of | exact |", "|---|---:|---:|---:|"]
    lines += [f"| {t} | {right} | {n} | {right / n:.1%} |" for t, (right, n) in table.items()]
    return "\n".join(lines)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.argument("dataset", type=click.Path(path_type=Path, exists=True))
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--thinking/--no-thinking", default=True, show_default=True)
def main(folder: Path, dataset: Path, dtype: str, thinking: bool) -> None:
    """Print the accuracy of the model in FOLDER on DATASET, and its wrong answers."""
    table, wrong = accuracy(folder, read_rows(dataset), dtype, thinking)
    for row, reply in wrong:
        print(f"{row['messages'][-1]['content']!r}: {reply!r}, expected {row['target']!r}")
    print(as_markdown(table))


if __name__ == "__main__":
    main()
