"""Trains the draft of the demo model: a tenth of its size, on the same examples.

    python -m training.train_draft --out worker/demo

reads `<out>/model/tokenizer.json` and writes `<out>/draft/`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer

from training import export
from training.card import write_draft_card
from training.model import Qwen3, Qwen3Config
from training.train_demo import train

SHAPE = Qwen3Config(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,  # with one, it could not copy from the question
    num_attention_heads=2,
    num_key_value_heads=1,
)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the demo.")
@click.option("--steps", default=3500, show_default=True)
@click.option("--tokens", default=2048, show_default=True, help="Tokens per batch.")
@click.option("--lr", default=4e-3, show_default=True, help="Peak learning rate.")
@click.option("--seed", default=2, show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(out: Path, steps: int, tokens: int, lr: float, seed: int, threads: int) -> None:
    """Train the draft of the demo model in OUT/model and write it to OUT/draft."""
    torch.set_num_threads(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(seed)
    folder = out / "draft"
    tokenizer = Tokenizer.from_file(str(out / "model" / "tokenizer.json"))
    model = Qwen3(SHAPE)
    export.write_texts(folder, SHAPE, tokenizer)
    started = time.process_time()
    train(model, tokenizer, folder, steps=steps, tokens=tokens, lr=lr, seed=seed)
    write_draft_card(
        folder,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=SHAPE.num_hidden_layers,
        hidden=SHAPE.hidden_size,
        steps=steps,
        tokens=tokens,
        lr=lr,
        seed=seed,
        minutes=(time.process_time() - started) / 60,
    )


if __name__ == "__main__":
    main()
