"""Rows with one system prompt, rows without, and a conversation: the prefix cache on and off.

    python -m bench.prefix [--rows 256] [--rounds 3] [--parts arithmetic,shared,distinct,turns]

Random weights in the shape of Qwen3-0.6B, bf16, batch 16, greedy.

"Shared": all rows begin with the same 400 tokens, then come 20 to 200 of each row's own, and
answers of 5 to 120 tokens. "transformers": static batches of the same rows, see static_batches.py.
"Arithmetic": the same rows with the cache on, beside what they would take if the tokens that have
to be computed had the speed of `Rates`: nothing but forward passes, and a full batch to the end.
"Distinct": rows of the same lengths that have nothing in common, with the cache on and off: what it
costs to keep state that nobody uses. Few rows at a time, so that both sides see the same machine.
The cache is full from the beginning, as it is for nearly all of a long run: how long the system
takes to provide new memory is not measured.
"Turns": seconds to the first token of each turn of a conversation, beside llama.cpp after
`make bench-peers`.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from statistics import mean

import click
import torch

from bench.contestants import load_reference
from bench.harness import median, report, seconds
from bench.models import quantise
from bench.peers.process import PYTHON, PeerProcess
from bench.prefix_rows import BATCH, SYSTEM, Rates, Rows, answer_of, make_rows
from bench.shapes import QWEN3_06B, random_checkpoint
from bench.static_batches import StaticBatches
from jobs.api.sampling import Sampling
from worker import Engine
from worker.device import choose_device
from worker.local.collect import Token

FULL_BYTES = 3 << 29  # the limit of a cache that is full
GROUP = 4  # rows without a common beginning that each side computes in its turn
PARTS = ("arithmetic", "shared", "distinct", "turns")
WARM_UP = 1_000_000  # a seed that no round has
TURNS, TURN, REPLY = 20, 30, 10  # turns, and new tokens and tokens of the answer in each

Run = Callable[[list[list[int]], list[Sampling]], object]
Figures = dict[str, object]
# Seconds to the first token after a prompt, and so many tokens.
Turn = Callable[[list[int], int], tuple[float, list[int]]]


def measure_rows(contestants: dict[str, Run], rows: Iterable[Rows]) -> dict[str, list[float]]:
    """Rows per second of each contestant in each round; each round has other rows, so that nothing
    is kept of the one before. The order rotates."""
    names = list(contestants)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number, (prompts, answers) in enumerate(rows):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken = seconds(partial(contestants[name], prompts, answers))
            found[name].append(len(prompts) / taken)
            print(f"  round {number}: {name}: {found[name][-1]:.4g}", file=sys.stderr)
    return found


def compared(found: dict[str, list[float]]) -> Figures:
    """The medians, and "on" beside the others in the same round."""
    figures: Figures = {f"{name} rows/s": median(speeds) for name, speeds in found.items()}
    for other in [name for name in found if name != "on"]:
        ratios = [a / b for a, b in zip(found["on"], found[other], strict=True)]
        figures[f"on / {other}"] = median(ratios)
        figures[f"rounds beside {other}"] = " ".join(f"{ratio:.3f}" for ratio in ratios)
    return figures


def measure_arithmetic(on: Engine, count: int, rounds: int) -> Figures:
    """Rows with a common beginning, beside arithmetic with rates from before and after them."""
    vocab = on.tokenizer.vocab_size
    warm_up({"on": on.generate}, vocab, shared=True)
    found: dict[str, list[float]] = {"on": [], "arithmetic": []}
    for number in range(rounds):
        rows = make_rows(count, vocab, number, shared=True)
        before = Rates.measure(on, 1000 + number)
        taken = seconds(partial(on.generate, *rows))
        after = Rates.measure(on, 2000 + number)
        bounds = [rates.seconds(*rows) for rates in (before, after)]
        for rates, bound in zip((before, after), bounds, strict=True):
            print(f"  round {number}: {rates}: {bound:.4g} s", file=sys.stderr)
        print(f"  round {number}: on: {taken:.4g} s", file=sys.stderr)
        found["on"].append(count / taken)
        found["arithmetic"].append(count / mean(bounds))
    return compared(found)


def measure_shared(
    on: Engine, off: Engine, reference: StaticBatches, count: int, rounds: int
) -> Figures:
    """Rows with a common beginning, beside transformers."""
    vocab = on.tokenizer.vocab_size

    def static(prompts: list[list[int]], answers: list[Sampling]) -> None:
        reference.run(prompts, [one.max_tokens or 1 for one in answers], SYSTEM)

    contestants: dict[str, Run] = {"on": on.generate, "off": off.generate, "transformers": static}
    warm_up(contestants, vocab, shared=True)
    rows = (make_rows(count, vocab, number, shared=True) for number in range(rounds))
    return compared(measure_rows(contestants, rows))


def measure_distinct(path: Path, place: torch.device, count: int, rounds: int) -> Figures:
    """Rows that have nothing in common, a few at a time, with a full cache."""
    engines = {
        name: Engine.load(
            str(path),
            device=str(place),
            max_batch=GROUP,
            prefix_cache=name == "on",
            cache_bytes=FULL_BYTES,
        )
        for name in ("on", "off")
    }
    vocab = engines["on"].tokenizer.vocab_size
    contestants: dict[str, Run] = {name: engine.generate for name, engine in engines.items()}
    warm_up(contestants, vocab, shared=False)
    fill(engines["on"], vocab)
    groups = range(max(1, count // GROUP) * rounds)
    return compared(
        measure_rows(contestants, (make_rows(GROUP, vocab, one, shared=False) for one in groups))
    )


def fill(on: Engine, vocab: int) -> None:
    """Generate until what is kept grows no more."""
    seed, before = WARM_UP, -1
    while (kept := on._core.book.kept.nbytes) > before:
        seed, before = seed + 1, kept
        on.generate(*make_rows(GROUP, vocab, seed, shared=False))


def warm_up(contestants: dict[str, Run], vocab: int, *, shared: bool) -> None:
    for generate in contestants.values():
        generate(*make_rows(BATCH // 4, vocab, WARM_UP, shared=shared))


def conversation(turn: Turn, vocab: int, seed: int, turns: int = TURNS) -> list[float]:
    """Seconds to the first token of each turn."""
    draw = random.Random(seed)
    history: list[int] = []
    found = []
    for _ in range(turns):
        history += [draw.randrange(vocab) for _ in range(TURN)]
        first, answer = turn(history, REPLY)
        found.append(first)
        history += answer
    return found


def turn_of(engine: Engine) -> Turn:
    def turn(prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        stream = engine.generate_stream(prompt, answer_of(tokens))
        first: list[Token] = []
        taken = seconds(lambda: first.append(next(stream)))
        return taken, [token.id for token in [*first, *stream]]

    return turn


def measure_turns(contestants: dict[str, Turn], vocab: int, rounds: int) -> list[Figures]:
    for turn in contestants.values():
        conversation(turn, vocab, WARM_UP, turns=2)
    times: dict[str, list[list[float]]] = {name: [] for name in contestants}
    for seed in range(rounds):
        for name, turn in contestants.items():
            times[name].append(conversation(turn, vocab, seed))
            print(f"  round {seed}: {name}: {times[name][-1][-1]:.3g} s", file=sys.stderr)
    rows: list[Figures] = []
    for name, found in times.items():
        second, last = (median([one[number] for one in found]) for number in (1, TURNS - 1))
        rows.append(
            {
                "contestant": name,
                "turn 2 s": second,
                f"turn {TURNS} s": last,
                f"turn {TURNS} / turn 2": last / second,
            }
        )
    return rows


@click.command()
@click.option("--device", default="auto", show_default=True)
@click.option("--rows", "count", default=256, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--parts", default=",".join(PARTS), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(device: str, count: int, rounds: int, parts: str, out: Path | None) -> None:
    """Measure rows per second and seconds to the first token, with the prefix cache on and off."""
    place, chosen = choose_device(device), parts.split(",")
    if unknown := set(chosen) - {*PARTS}:
        raise click.UsageError(f"unknown parts: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = random_checkpoint(Path(folder), "qwen3", QWEN3_06B)

        @cache
        def engine(reuse: bool) -> Engine:
            return Engine.load(str(path), device=str(place), max_batch=BATCH, prefix_cache=reuse)

        shape = f"Qwen3-0.6B shape, bf16, {place}"
        title = f"{shape}, batch {BATCH}"
        if "arithmetic" in chosen:
            figures = measure_arithmetic(engine(True), count, rounds)
            file = out and out.with_stem("arithmetic")
            report(f"{count} rows beside arithmetic, {title}", [figures], str(place), file)
        if "shared" in chosen:
            reference = StaticBatches(load_reference(path, place), place, BATCH)
            figures = measure_shared(engine(True), engine(False), reference, count, rounds)
            report(f"{count} rows with a common beginning, {title}", [figures], str(place), out)
        if "distinct" in chosen:
            figures = measure_distinct(path, place, count, rounds)
            file = out and out.with_stem("distinct")
            name = f"{count} rows with nothing in common, {GROUP} at a time, {shape}"
            report(name, [figures], str(place), file)
        if "turns" in chosen:
            on = engine(True)
            contestants = {"on": turn_of(on), "off": turn_of(engine(False))}
            if PYTHON.exists() and place.type == "cpu":
                file = quantise(path, "BF16", Path(folder) / "shape.gguf")
                peer = PeerProcess("llama_cpp_peer", file, torch.get_num_threads())
                contestants["llama.cpp"] = stack.enter_context(peer).turn
            turns = measure_turns(contestants, on.tokenizer.vocab_size, rounds)
            report(f"Conversation, {title}", turns, str(place), out and out.with_stem("turns"))


if __name__ == "__main__":
    main()
