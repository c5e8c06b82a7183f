"""The host's time of a decode step: a batch of sequences, and a model that computes nothing.

    python -m bench.steps [--batch 256] [--rounds 5] [--temperature 0.6] [--text] [--overlapped]
                          [--profile]

Microseconds of the engine's thread for each sequence and step: to plan, to draw from 64 logits, to
commit and to hand tokens to a listener. Time in which others use the processor does not count.
`--text`: with a detokenizer. `--overlapped`: steps are launched as on a GPU.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import click
import torch
from torch import Tensor

from bench.harness import median
from jobs.api.sampling import Sampling
from worker.cache_memory import alone
from worker.device import Device, choose_device
from worker.engine.engine import EngineCore
from worker.engine.sequence import Sequence
from worker.engine.slots import Slots
from worker.layers.batch import Batch
from worker.layers.cache import LayerCache
from worker.loading.load import load
from worker.model_spec import ModelSpec
from worker.processes.tuning import freeze_gc_heap, tune
from worker.text.detokenizer import Detokenizer

VOCABULARY, STEPS, WARM_UP = 64, 100, 8


class Nothing:
    """A model without layers, whose logits are all alike."""

    vocab_size, context_length, stretched = VOCABULARY, 4096, False

    def __init__(self, device: torch.device) -> None:
        self._logits = torch.zeros(512, VOCABULARY, device=device)

    def __call__(self, batch: Batch, caches: SequenceOf[LayerCache]) -> Tensor:
        rows = len(batch.token_ids) if batch.logits_rows is None else len(batch.logits_rows)
        return self._logits[:rows]

    def make_caches(self) -> list[LayerCache]:
        return []

    def rotation(self, prompt_length: int) -> tuple[int, ...]:
        return ()


@click.command()
@click.option("--device", default="auto", show_default=True)
@click.option("--batch", default=256, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--temperature", default=0.6, show_default=True)
@click.option("--text", is_flag=True, help="With a detokenizer.")
@click.option("--overlapped", is_flag=True, help="Launch steps as on a GPU, on any device.")
@click.option("--profile", is_flag=True)
def main(
    device: str,
    batch: int,
    rounds: int,
    temperature: float,
    text: bool,
    overlapped: bool,
    profile: bool,
) -> None:
    """Measure microseconds for each sequence of a decode step."""
    tune()
    place = Device(choose_device(device))
    demo = load(ModelSpec(reference="demo", dtype="fp32"), place)
    model: Any = Nothing(place.torch)
    core = EngineCore(
        replace(demo, model=model), slots=Slots(batch), context=4096, share=alone(2**30)
    )
    core._pipeline.overlaps = core._pipeline.overlaps or overlapped
    freeze_gc_heap()

    def one_round(number: int) -> float:
        sequences = []
        for seed in range(batch):
            options = Sampling(temperature=temperature, seed=seed, max_tokens=4000, ignore_eos=True)
            params = core.sampling_params(options, [seed, number, 3])
            events = Detokenizer(core.tokenizer) if text else None
            sequences.append(Sequence([seed, number, 3], params, 0, events, lambda event: None))
        core.add(sequences)
        for _ in range(WARM_UP):
            core.step()
        begin = time.thread_time()
        for _ in range(STEPS):
            core.step()
        taken = time.thread_time() - begin
        for one in sequences:
            one.cancel()
        while core.step():
            pass
        return taken / STEPS / batch * 1e6

    if profile:
        with cProfile.Profile() as found:
            one_round(0)
        pstats.Stats(found).sort_stats("tottime").print_stats(32)
        return
    figures = [one_round(number) for number in range(rounds)]
    rounded = ", ".join(f"{one:.2f}" for one in figures)
    print(f"batch {batch}: {median(figures):.2f} us per sequence and step ({rounded})")


if __name__ == "__main__":
    main()
