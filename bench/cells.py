"""The cells of the tables beside peers: decode and prefill, by batch and length of the prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import partial

from bench.contestants import Generate, decode_rate, prefill_rate, random_prompts
from bench.harness import alternate, median
from bench.peers.process import PeerFailed

PROMPT = 64
SMALLEST_VOCABULARY = 1000  # token ids that every contestant has
BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
CELLS: dict[str, tuple[int, int, bool]] = {  # batch, prompt length, whether prefill is measured
    **{f"decode {batch}": (batch, PROMPT, False) for batch in BATCHES},
    "prefill 16 x 64": (16, 64, True),
    "prefill 1 x 512": (1, 512, True),
}
# Between these batches the products of bf16 weights change their way of computing.
ONLY_BF16 = tuple(f"decode {batch}" for batch in (2, 4, 6, 12, 24))


def cells_of(format_name: str) -> list[str]:
    """The cells of the table of a format, unless others are asked for."""
    return [cell for cell in CELLS if format_name == "bf16" or cell not in ONLY_BF16]


Rates = Mapping[str, float | None]  # tokens per second by contestant; None: it can't run


def measure_cell(cell: str, contestants: Mapping[str, Generate], rounds: int) -> Rates:
    """The median of each contestant, measured in turns."""
    batch, length, prefill = CELLS[cell]
    prompts = random_prompts(batch, length, SMALLEST_VOCABULARY)
    able = {}
    for who, generate in contestants.items():
        try:
            generate(prompts, 1 if prefill else 2)
        except PeerFailed as error:
            print(f"  {who} failed: {error}", file=sys.stderr)
        else:
            able[who] = partial(prefill_rate if prefill else decode_rate, generate, prompts)
    medians = {who: median(values) for who, values in alternate(able, rounds).items()}
    return {who: medians.get(who) for who in contestants}


def beside(rates: Rates, others: Iterable[str]) -> float | None:
    """The speed of chatjobs as a multiple of the best of the others; None if none of them ran."""
    ours, best = rates["chatjobs"], max((rates[who] or 0.0 for who in others), default=0.0)
    return ours / best if ours and best else None
