"""Answers with a draft and without one, in turn.

    python -m bench.speculative [--rounds 5] [--parts draft,ngram,large]

"Draft": the demo model with its draft on the first of the demo's questions, in bf16, whole calls.
"Ngram": copy and edit: the prompt is a text of 300 tokens, and the answer repeats it with one token
in 20 changed. A model with random weights does not copy, so the model computes as always, and then
the logit of the scripted token at each position is raised: the time is that of the model, and the
tokens are those of the task. Of the demo model, and in the shape of Qwen3-0.6B ("large").
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from bench.harness import median, report, seconds
from bench.shapes import QWEN3_06B, random_checkpoint
from jobs.api.sampling import Sampling
from worker import Engine
from worker.demo import DATASET
from worker.device import choose_device
from worker.engine.engine import EngineCore
from worker.layers.batch import Batch
from worker.layers.cache import LayerCache

TEXT, EDITED = 300, 20  # tokens of the text, and one of how many is changed
EDITED_TOKENS = 256  # of the answer that are generated
SURE = 1e4  # added to the logit of the scripted token
GREEDY = Sampling(temperature=0, max_tokens=160)

Prompts = list[list[int]]
Figures = dict[str, object]


class Copying:
    """A model whose next token after position p is `script[p + 1]`."""

    def __init__(self, core: EngineCore, script: Sequence[int]) -> None:
        self._model: Any = core.runner.model
        self._script = torch.tensor([*script, 0], device=core.device)

    def __call__(self, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        logits: Tensor = self._model(batch, caches)
        after = batch.select_logits_rows(batch.positions + 1)
        return logits.scatter_add_(
            1,
            self._script[after][:, None],
            torch.full_like(after, SURE, dtype=logits.dtype)[:, None],
        )


def copy_and_edit(vocab: int, seed: int) -> tuple[list[int], list[int]]:
    """A text, and the same text with changes."""
    draw = random.Random(seed)
    text = [draw.randrange(vocab) for _ in range(TEXT)]
    edited = [draw.randrange(vocab) if draw.random() < 1 / EDITED else token for token in text]
    return text, edited


def questions(engine: Engine, count: int) -> Prompts:
    """Prompts of the demo's first questions."""
    with DATASET.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in islice(file, count)]
    texts = [
        "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row["messages"])
        for row in rows
    ]
    return [engine.tokenizer.encode(f"{text}<|im_start|>assistant\n") for text in texts]


def one_by_one(engine: Engine, prompts: Prompts, sampling: Sampling) -> list[list[int]]:
    return [engine.generate([prompt], sampling)[0].token_ids for prompt in prompts]


def together(engine: Engine, prompts: Prompts, sampling: Sampling) -> list[list[int]]:
    return [one.token_ids for one in engine.generate(prompts, sampling)]


def compare(
    task: str, engines: dict[str, Engine], run: Callable[[Engine], list[list[int]]], rounds: int
) -> Figures:
    """Tokens per second of two engines in turn."""
    plain, drafted = engines.values()
    figures = drafted._core.speculation
    expected = run(plain)  # warms up
    same, tokens = run(drafted) == expected, sum(map(len, expected))
    found: dict[str, list[float]] = {name: [] for name in engines}
    before = figures.steps, figures.drafted_tokens, figures.accepted_tokens
    for number in range(rounds):
        for name in list(engines) if number % 2 else [*reversed(engines)]:
            spent = seconds(partial(run, engines[name]))
            found[name].append(tokens / spent)
            print(f"  {task}: {name}: {found[name][-1]:.4g} tokens/s", file=sys.stderr)
    steps, proposed, accepted = (
        after - earlier
        for after, earlier in zip(
            (figures.steps, figures.drafted_tokens, figures.accepted_tokens), before, strict=True
        )
    )
    ratios = [b / a for a, b in zip(*found.values(), strict=True)]
    return {
        "task": task,
        "plain tokens/s": median(found["plain"]),
        "drafted tokens/s": median(found["drafted"]),
        "drafted / plain": median(ratios),
        "accepted": f"{accepted / max(proposed, 1):.0%}",
        "accepted a step": accepted / max(steps, 1),
        "same tokens": "yes" if same else "no",
    }


def pair(reference: str, place: torch.device, batch: int, **draft: Any) -> dict[str, Engine]:
    load = partial(Engine.load, reference, device=str(place), max_batch=batch, prefix_cache=False)
    return {"plain": load(), "drafted": load(**draft)}


def measure_draft(place: torch.device, rounds: int, count: int) -> list[Figures]:
    rows = []
    for batch, run in ((1, one_by_one), (16, together)):
        for draft in ("demo-draft", "ngram"):
            engines = pair("demo", place, batch, draft=draft)
            prompts = questions(engines["plain"], count * (1 if batch == 1 else 4))
            task = f"{draft}, batch {batch}"
            rows.append(
                compare(task, engines, partial(run, prompts=prompts, sampling=GREEDY), rounds)
            )
    return rows


def measure_ngram(
    reference: str, place: torch.device, rounds: int, batches: Sequence[int], tokens: int
) -> list[Figures]:
    rows = []
    for batch in batches:
        engines = pair(reference, place, batch, draft="ngram")
        text, edited = copy_and_edit(engines["plain"].tokenizer.vocab_size, 1)
        for engine in engines.values():
            core: Any = engine._core
            core.runner.model = Copying(core, text + edited)
        answer = Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
        run = partial(together, prompts=[text] * batch, sampling=answer)
        rows.append(compare(f"copy and edit, batch {batch}", engines, run, rounds))
    return rows


@click.command()
@click.option("--device", default="auto", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--questions", "count", default=24, show_default=True)
@click.option("--parts", default="draft,ngram,large", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(device: str, rounds: int, count: int, parts: str, out: Path | None) -> None:
    """Measure tokens per second with drafts and without."""
    place = choose_device(device)
    if "draft" in parts:
        rows = measure_draft(place, rounds, count)
        report(f"Speculative decoding, demo model, {place}", rows, str(place), out)
    if "ngram" in parts:
        rows = measure_ngram("demo", place, rounds, (1, 16), EDITED_TOKENS)
        title = f"Copy and edit, demo model, {place}"
        report(title, rows, str(place), out and out.with_stem("ngram"))
    if "large" in parts:
        with tempfile.TemporaryDirectory() as folder:
            path = random_checkpoint(Path(folder), "qwen3", QWEN3_06B)
            rows = measure_ngram(str(path), place, rounds, (1,), EDITED_TOKENS // 4)
        title = f"Copy and edit, Qwen3-0.6B shape, bf16, {place}"
        report(title, rows, str(place), out and out.with_stem("large"))


if __name__ == "__main__":
    main()
