"""Speed on a GPU, beside the byte floor and transformers: decode, time to first token, a traffic.

    python -m bench.gpu [--seconds 240] [--shape 0.6B] [--format bf16] [--batches 1,16]
                        [--out gpu.json]

Qwen3-0.6B and Qwen3-8B shapes with random weights that are made on the device, in bf16 and Q4_K;
with `--shape 30B-A3B` that of Qwen3-30B-A3B, whose bf16 takes 61 GB.
Decode-only tokens per second: prompts of 64 tokens, the time of 32 steps after the second token; of
transformers the time of 34 new tokens less the time of two.
Prefill: seconds of one new token after 2,000. The floor of a step is the time to read the weights
and the keys and values of each sequence once, at the speed of a large copy; of a mixture, the
experts that the batch chooses in the mean (`bench.gpu_models.Read`). transformers: SDPA, a
static cache, not compiled unless `--compiled`. Traffic is in the manner of nano-vllm's, with
seeds of our own: 256 requests of 100 to 1,024 random tokens with 100 to 1,024 new ones, temperature
0.6, in two turns of which the first one makes the graphs; transformers serves that of the first
turn by continuous batching. Process settings are those of a worker.

What does not begin within --seconds is left out. With --profile, the kernels of decode steps are
listed, and the calls that wait for the device. On a CPU, `--tiny` shows that the benchmark runs.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from gguf import GGMLQuantizationType as Type

from bench.contestants import DECODED, Generate, ours, random_prompts
from bench.gpu_models import (
    Read,
    cache_bytes,
    copy_bandwidth,
    our_engine,
    their_model,
)
from bench.gpu_traffic import Traffic, serve, serve_by_transformers, start, step_until_drawn, stop
from bench.harness import environment, median, report, seconds
from bench.shapes import QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B
from jobs.api.sampling import Sampling
from worker import Engine
from worker.device import choose_device
from worker.processes.tuning import freeze_gc_heap, tune, unfreeze_gc_heap

PROMPT, LONG_PROMPT = 64, 2000
SMALLEST_VOCABULARY = 1000
FIRST_TOKEN = f"first token of {LONG_PROMPT}, seconds"
TINY = {
    **{"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 2048},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
}
TINY_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
SHAPES = {"0.6B": QWEN3_06B, "8B": QWEN3_8B, "30B-A3B": QWEN3_30B_A3B}
MEASURED = ("0.6B", "8B")  # unless shapes are given
FORMATS: dict[str, Type | None] = {"bf16": None, "Q4_K": Type.Q4_K}
PROFILED_STEPS, KERNELS = 8, 18
TRAFFIC = "traffic"
TURNS = ("first turn", "second turn")  # the first one makes graphs and compiles kernels


@dataclass
class Clock:
    """The time that is left."""

    limit: float
    begin: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        return self.limit - (time.perf_counter() - self.begin)


@click.command()
@click.option("--device", default="auto", show_default=True)
@click.option("--seconds", "limit", default=240.0, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--shape", "shapes", multiple=True, default=MEASURED, type=click.Choice(list(SHAPES)))
@click.option("--format", "formats", multiple=True, type=click.Choice(list(FORMATS)))
@click.option("--batches", default="1,16,64,256", show_default=True)
@click.option("--alone", is_flag=True, help="Without transformers.")
@click.option("--compiled", is_flag=True, help="transformers compiles its forward pass.")
@click.option("--traffic/--no-traffic", default=True)
@click.option("--traffic-seconds", default=60.0, show_default=True)
@click.option("--profile", is_flag=True)
@click.option("--tiny", is_flag=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(
    device: str,
    limit: float,
    rounds: int,
    shapes: tuple[str, ...],
    formats: tuple[str, ...],
    batches: str,
    alone: bool,
    compiled: bool,
    traffic: bool,
    traffic_seconds: float,
    profile: bool,
    tiny: bool,
    out: Path | None,
) -> None:
    """Measure tokens per second, and the ratio to the floor."""
    clock, place = Clock(limit), choose_device(device)
    tune()
    sizes = [int(size) for size in batches.split(",")]
    bandwidth = copy_bandwidth(place, 2**24 if tiny else 2**32)
    print(f"copy: {bandwidth / 1e9:,.0f} GB/s read and written", flush=True)
    rows: list[dict[str, Any]] = []
    profiles: dict[str, Any] = {}
    for shape in shapes:
        fields = _tiny(SHAPES[shape]) if tiny else SHAPES[shape]
        for name in formats or tuple(FORMATS):
            if clock.left <= 0:
                break
            engine, read = our_engine(fields, FORMATS[name], place, max(sizes))
            freeze_gc_heap()
            cells = Cells(engine, read, cache_bytes(fields), bandwidth, rounds, clock)
            if profile:
                profiles[f"{shape} {name}"] = [
                    *[_profiled(engine, batch, heat) for batch in sizes for heat in (0.0, 0.6)],
                    _profiled_prefill(engine, 1, LONG_PROMPT),
                    _profiled_prefill(engine, max(sizes), PROMPT),
                ]
            found = [{"model": f"{shape} {name}", **row} for row in cells.measure(sizes)]
            if traffic and (shape, name) == ("0.6B", "bf16"):
                for turn in TURNS:
                    if clock.left > 0:
                        row = cells.traffic(turn, Traffic.random(turn, tiny=tiny), traffic_seconds)
                        found.append({"model": f"{shape} {name}", **row})
            rows += found
            for row in found:
                print(json.dumps(row), flush=True)
            engine.close()
            unfreeze_gc_heap()
            del engine
            _free()
            if name == "bf16" and not alone and clock.left > 0:
                print(f"transformers, {shape}", flush=True)
                model = their_model(fields, place)
                cells.beside(found, sizes, _theirs(model, place, compiled))
                served = Traffic.random(TURNS[0], tiny=tiny)
                if traffic and shape == "0.6B" and clock.left > 0:
                    rate = serve_by_transformers(model, served, traffic_seconds)
                    _beside_traffic(found, rate)
                del model
                _free()
            del cells
    title = f"GPU, copy {bandwidth / 1e12:.2f} TB/s, tokens/s"
    if rows:
        report(title, rows, str(place), out)
    if out is not None:
        facts = {"copy_bytes_per_second": bandwidth, **environment(str(place))}
        out.write_text(
            json.dumps(
                {"title": title, "facts": facts, "rows": rows, "profiles": profiles}, indent=1
            )
        )


def _tiny(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, **TINY, **(TINY_EXPERTS if "num_experts" in fields else {})}


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _theirs(model: Any, device: torch.device, compiled: bool) -> Generate:
    """transformers' `generate`, greedily, with a static cache."""

    @torch.inference_mode()
    def generate(prompts: list[list[int]], tokens: int) -> float:
        ids = torch.tensor(prompts, device=device)
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens}
        options["min_new_tokens"] = tokens
        options |= {"cache_implementation": "static", "disable_compile": not compiled}
        mask = torch.ones_like(ids)
        return seconds(lambda: model.generate(ids, attention_mask=mask, pad_token_id=0, **options))

    return generate


class Cells:
    """The rows of the table for one model."""

    def __init__(
        self,
        engine: Engine,
        read: Read,
        position_bytes: int,
        bandwidth: float,
        rounds: int,
        clock: Clock,
    ) -> None:
        self._engine, self._generate = engine, ours(engine)
        self._read, self._position_bytes = read, position_bytes
        self._bandwidth, self._rounds, self._clock = bandwidth, rounds, clock

    def measure(self, batches: list[int]) -> Iterator[dict[str, Any]]:
        for batch in batches:
            prompts = random_prompts(batch, PROMPT, SMALLEST_VOCABULARY)
            rate = self._median(partial(_our_decode, self._engine, prompts))
            if rate is None:
                return
            read = self._read.step(batch) + batch * (PROMPT + DECODED // 2) * self._position_bytes
            floor = batch * self._bandwidth / read
            yield _row(_decode_cell(batch), rate, floor)
        prompts = random_prompts(1, LONG_PROMPT, SMALLEST_VOCABULARY)
        taken = self._median(partial(self._generate, prompts, 1))
        if taken is not None:
            yield _row(FIRST_TOKEN, taken)

    def beside(self, rows: list[dict[str, Any]], batches: list[int], their: Generate) -> None:
        """Add the figures of transformers to the rows of the same cells."""
        able = {
            _decode_cell(batch): partial(
                _their_decode, their, random_prompts(batch, PROMPT, SMALLEST_VOCABULARY)
            )
            for batch in batches
        }
        prompts = random_prompts(1, LONG_PROMPT, SMALLEST_VOCABULARY)
        able[FIRST_TOKEN] = partial(their, prompts, 1)
        for row in rows:
            if row["cell"] in able:
                figure = self._median(able[row["cell"]])
                if figure is not None:
                    ratio = row["chatjobs"] / figure
                    row["transformers"] = figure
                    row["ours / transformers"] = 1 / ratio if row["cell"] == FIRST_TOKEN else ratio

    def _median(self, work: Callable[[], float]) -> float | None:
        """Of the rounds that begin in time, but for the first, which warms up."""
        figures: list[float] = []
        for number in range(self._rounds + 1):
            if self._clock.left <= 0:
                break
            figure = work()
            if number:
                figures.append(figure)
        return median(figures) if figures else None

    def traffic(self, turn: str, traffic: Traffic, limit: float) -> dict[str, Any]:
        """All requests at once, ended after `limit` seconds."""
        made, steps, taken = serve(self._engine, traffic, limit)
        read = steps * self._read.always + traffic.positions * self._position_bytes
        wanted = sum(traffic.lengths)
        floor = wanted / (read / self._bandwidth)
        print(
            f"traffic, {turn}: {made} of {wanted} tokens, {steps} steps, {taken:.2f} s", flush=True
        )
        return _row(f"{TRAFFIC} of {len(traffic.prompts)}, {turn}", made / taken, floor)


def _beside_traffic(rows: list[dict[str, Any]], rate: float | None) -> None:
    """Add the rate of transformers to the rows of traffic."""
    for row in rows:
        if rate is not None and row["cell"].startswith(TRAFFIC):
            row["transformers"], row["ours / transformers"] = rate, row["chatjobs"] / rate


def _our_decode(engine: Engine, prompts: list[list[int]]) -> float:
    options = Sampling(temperature=0, max_tokens=200, ignore_eos=True)
    core, sequences = engine._core, start(engine, prompts, [options] * len(prompts))
    try:
        step_until_drawn(engine, sequences, 2)
        before = core.tokens_generated
        taken = seconds(lambda: [engine.step() for _ in range(DECODED)])
        made = core.tokens_generated - before
        if sequences.error is not None:
            raise sequences.error
        return made / taken
    finally:
        stop(engine, sequences)


def _their_decode(generate: Generate, prompts: list[list[int]]) -> float:
    taken = generate(prompts, 2 + DECODED) - generate(prompts, 2)
    return len(prompts) * DECODED / taken


def _decode_cell(batch: int) -> str:
    return f"decode {batch}"


def _row(cell: str, figure: float, floor: float | None = None) -> dict[str, Any]:
    return {
        "cell": cell,
        "chatjobs": figure,
        "floor": floor,
        "ours / floor": None if floor is None else figure / floor,
        "transformers": None,
        "ours / transformers": None,
    }


def _profiled(engine: Engine, batch: int, temperature: float) -> dict[str, Any]:
    """Of a decode step."""
    prompts = random_prompts(batch, PROMPT, SMALLEST_VOCABULARY)
    options = Sampling(temperature=temperature, max_tokens=200, ignore_eos=True)
    sequences = start(engine, prompts, [options] * batch)
    for _ in range(8):
        engine.step()
    title = f"decode {batch} at temperature {temperature}"
    found = _profile(title, engine.step, PROFILED_STEPS)
    stop(engine, sequences)
    return found


def _profiled_prefill(engine: Engine, batch: int, length: int) -> dict[str, Any]:
    """Of a first token."""
    prompts = random_prompts(batch, length, SMALLEST_VOCABULARY)
    options = Sampling(temperature=0, max_tokens=1, ignore_eos=True)
    engine.generate(prompts, options)
    return _profile(f"prefill {batch} x {length}", lambda: engine.generate(prompts, options), 1)


def _profile(title: str, work: Callable[[], object], times: int) -> dict[str, Any]:
    """The kernels of some work by their time, the calls that wait for the device, and its time."""
    from torch.profiler import ProfilerActivity, profile

    plain = seconds(lambda: [work() for _ in range(times)]) / times
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        for _ in range(times):
            work()
    events = found.key_averages()
    on_device = [
        (one.key[:70], one.count / times, one.self_device_time_total / times)
        for one in events
        if one.self_device_time_total and not one.key.startswith("aten::")
    ]
    on_device.sort(key=lambda one: -one[2])
    calls = {
        one.key: one.count / times
        for one in events
        if any(word in one.key for word in ("Synchronize", "Memcpy", "Launch", "cudaMalloc"))
    }
    total = sum(one[2] for one in on_device)
    print(f"profile of {title}: {plain * 1e3:.2f} ms, kernels {total / 1e3:.2f} ms")
    for key, count, micros in on_device[:KERNELS]:
        print(f"  {micros:9.1f} us {count:7.1f} x {key}")
    print(f"  {calls}", flush=True)
    return {
        "title": title,
        "ms": plain * 1e3,
        "kernel_ms": total / 1e3,
        "kernels": on_device[:40],
        "calls": calls,
    }


if __name__ == "__main__":
    main()
