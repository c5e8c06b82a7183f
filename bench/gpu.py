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

What does not begin within --seconds is left out, and so are models whose weights do not fit into
the free memory. transformers is last: its errors are lines in the output. After errors of ours the
exit code is 1; what was measured is printed all the same. With --profile, the kernels of decode
steps are listed, and the calls that wait for the device. On a CPU, `--tiny` shows that the
benchmark runs.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

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
    weight_bytes,
)
from bench.gpu_traffic import (
    Traffic,
    leave,
    serve,
    serve_by_transformers,
    start,
    step_until_drawn,
    stop,
)
from bench.harness import environment, first_line, median, print_table, seconds
from bench.shapes import QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B
from jobs.api.sampling import Sampling
from jobs.errors import JobError
from worker import Engine
from worker.device import choose_device, free_bytes
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
TRAFFIC, SERVED = "traffic", "0.6B bf16"  # the model that serves it
MOST_WEIGHTS = 0.8  # of the free memory; activations and the cache need some, too
TURNS = ("first turn", "second turn")  # the first one makes graphs and compiles kernels

T = TypeVar("T")


@dataclass
class Clock:
    """The time that is left."""

    limit: float
    begin: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        return self.limit - (time.perf_counter() - self.begin)


class Timed:
    """Measures what begins in time, and goes on after what fails."""

    def __init__(self, clock: Clock, rounds: int) -> None:
        self._clock, self._rounds = clock, rounds
        self.failed: list[str] = []  # names of cells and models, but for those that lack memory

    @property
    def ended(self) -> bool:
        return self._clock.left <= 0

    def median(self, name: str, work: Callable[[], float]) -> float | None:
        """Of the rounds that begin in time, but for the first, which warms up."""
        figures: list[float] = []
        for number in range(self._rounds + 1):
            figure = self.once(name, work)
            if figure is None:
                break
            if number:
                figures.append(figure)
        return median(figures) if figures else None

    def once(self, name: str, work: Callable[[], T]) -> T | None:
        """None if it begins too late, or if a job fails: a line says so then."""
        if self.ended:
            return None
        try:
            return work()
        except JobError as error:
            print(f"{name}: left out: {error}", flush=True)
            if error.code != "out_of_memory":
                self.failed.append(name)
            return None

    @contextmanager
    def going_on(self, name: str) -> Iterator[None]:
        """Print any other error."""
        try:
            yield
        except Exception:
            traceback.print_exc()
            self.failed.append(name)


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
    timed, place = Timed(Clock(limit), rounds), choose_device(device)
    tune()
    sizes = [int(size) for size in batches.split(",")]
    environ = environment(str(place))  # a device that fails later may not say its name
    bandwidth = copy_bandwidth(place, 2**24 if tiny else 2**32)
    print(f"copy: {bandwidth / 1e9:,.0f} GB/s read and written", flush=True)
    title = f"GPU, copy {bandwidth / 1e12:.2f} TB/s, tokens/s"
    rows: list[dict[str, Any]] = []
    profiles: dict[str, Any] = {}
    fields = {shape: _tiny(SHAPES[shape]) if tiny else SHAPES[shape] for shape in shapes}
    try:
        for shape, name in product(shapes, formats or tuple(FORMATS)):
            model = f"{shape} {name}"
            _free()  # of a model that could not be made
            if timed.ended or not _fits(model, fields[shape], FORMATS[name], place):
                continue
            made = partial(_engine, fields[shape], FORMATS[name], place, max(sizes))
            with timed.going_on(model), made() as (engine, read):
                cells = Cells(model, engine, read, cache_bytes(fields[shape]), bandwidth, timed)
                served = traffic and model == SERVED
                turns = {turn: Traffic.random(turn, tiny=tiny) for turn in TURNS if served}
                for row in cells.measure(sizes, turns, traffic_seconds):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                if profile:
                    profiles[model] = _profiles(engine, sizes)
        if not alone:
            beside = Beside(rows, fields, place, timed)
            beside.generate(sizes, compiled)
            beside.serve(Traffic.random(TURNS[0], tiny=tiny), traffic_seconds)
    finally:  # of an interrupt, too
        print_table(title, rows, environ)
        if out is not None:
            facts = {"copy_bytes_per_second": bandwidth, **environ}
            content = {"title": title, "facts": facts, "rows": rows, "profiles": profiles}
            out.write_text(json.dumps(content, indent=1))
    if timed.failed:
        raise click.ClickException(f"failed: {', '.join(timed.failed)}")


def _fits(model: str, fields: dict[str, Any], kind: Type | None, place: torch.device) -> bool:
    """False, with a line, if the weights would leave too little of the memory that is free."""
    needed, free = weight_bytes(fields, kind), free_bytes(place)
    if needed <= MOST_WEIGHTS * free:
        return True
    print(
        f"{model}: left out, its weights take {needed / 2**30:.1f} GiB, more than "
        f"{MOST_WEIGHTS:.0%} of the {free / 2**30:.1f} GiB that are free",
        flush=True,
    )
    return False


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


@contextmanager
def _engine(
    fields: dict[str, Any], kind: Type | None, place: torch.device, max_batch: int
) -> Iterator[tuple[Engine, Read]]:
    """An engine whose memory is free then, and what it reads."""
    engine, read = our_engine(fields, kind, place, max_batch)
    freeze_gc_heap()
    try:
        yield engine, read
    finally:
        unfreeze_gc_heap()
        engine.close()
        _free()


class Cells:
    """The rows of the table for one model."""

    def __init__(
        self,
        model: str,
        engine: Engine,
        read: Read,
        position_bytes: int,
        bandwidth: float,
        timed: Timed,
    ) -> None:
        self._model, self._engine = model, engine
        self._read, self._position_bytes = read, position_bytes
        self._bandwidth, self._timed = bandwidth, timed

    def measure(
        self, batches: list[int], turns: Mapping[str, Traffic], limit: float
    ) -> Iterator[dict[str, Any]]:
        """Those that begin in time and do not fail. `limit`: seconds of a turn of traffic."""
        for batch in batches:
            prompts, cell = random_prompts(batch, PROMPT, SMALLEST_VOCABULARY), _decode_cell(batch)
            rate = self._median(cell, partial(_our_decode, self._engine, prompts))
            if rate is not None:
                positions = batch * (PROMPT + DECODED // 2)
                read = self._read.step(batch) + positions * self._position_bytes
                yield self._row(cell, rate, batch * self._bandwidth / read)
        prompts = random_prompts(1, LONG_PROMPT, SMALLEST_VOCABULARY)
        first = self._median(FIRST_TOKEN, partial(ours(self._engine), prompts, 1))
        if first is not None:
            yield self._row(FIRST_TOKEN, first)
        for turn, traffic in turns.items():
            cell = f"{TRAFFIC} of {len(traffic.prompts)}, {turn}"
            work = partial(serve, self._engine, traffic, limit)
            served = self._timed.once(f"{self._model}, {cell}", work)
            if served is not None:
                made, steps, taken = served
                wanted = sum(traffic.lengths)
                read = steps * self._read.always + traffic.positions * self._position_bytes
                print(f"{cell}: {made} of {wanted} tokens, {steps} steps, {taken:.2f} s")
                yield self._row(cell, made / taken, wanted * self._bandwidth / read)

    def _median(self, cell: str, work: Callable[[], float]) -> float | None:
        return self._timed.median(f"{self._model}, {cell}", work)

    def _row(self, cell: str, figure: float, floor: float | None = None) -> dict[str, Any]:
        return {
            "model": self._model,
            "cell": cell,
            "chatjobs": figure,
            "floor": floor,
            "ours / floor": None if floor is None else figure / floor,
            "transformers": None,
            "ours / transformers": None,
        }


class Beside:
    """Adds the figures of transformers to the rows of models in bf16. An error of it is a line in
    the output, and ends nothing else."""

    def __init__(
        self,
        rows: list[dict[str, Any]],
        fields: Mapping[str, dict[str, Any]],
        place: torch.device,
        timed: Timed,
    ) -> None:
        self._rows, self._fields, self._place, self._timed = rows, fields, place, timed

    def generate(self, batches: list[int], compiled: bool) -> None:
        """Of the cells with these batches, and of a first token."""
        able: dict[str, Callable[[Generate], float]] = {
            _decode_cell(batch): partial(
                _their_decode, prompts=random_prompts(batch, PROMPT, SMALLEST_VOCABULARY)
            )
            for batch in batches
        }
        able[FIRST_TOKEN] = partial(
            _their_first_token, prompts=random_prompts(1, LONG_PROMPT, SMALLEST_VOCABULARY)
        )
        for shape in self._fields:
            rows = [row for row in self._of(f"{shape} bf16") if row["cell"] in able]
            if rows and not self._timed.ended:
                with _one_line(f"transformers, {shape}"):
                    self._generate(shape, rows, able, compiled)

    def _generate(
        self,
        shape: str,
        rows: list[dict[str, Any]],
        able: Mapping[str, Callable[[Generate], float]],
        compiled: bool,
    ) -> None:
        _free()
        generate = _theirs(their_model(self._fields[shape], self._place), self._place, compiled)
        for row in rows:
            name = f"transformers, {shape}, {row['cell']}"
            with _one_line(name):
                figure = self._timed.median(name, partial(able[row["cell"]], generate))
                if figure is not None:
                    _set_beside(row, figure)

    def serve(self, traffic: Traffic, limit: float) -> None:
        """Of traffic, by continuous batching: last, because its thread may not end."""
        rows = [row for row in self._of(SERVED) if row["cell"].startswith(TRAFFIC)]
        if rows and not self._timed.ended:
            with _one_line("transformers, continuous batching"):
                _free()
                model = their_model(self._fields[SERVED.partition(" ")[0]], self._place)
                rate = serve_by_transformers(model, traffic, limit)
                for row in rows:
                    if rate is not None:
                        _set_beside(row, rate)

    def _of(self, model: str) -> list[dict[str, Any]]:
        return [row for row in self._rows if row["model"] == model]


def _set_beside(row: dict[str, Any], figure: float) -> None:
    ratio = row["chatjobs"] / figure
    row["transformers"] = figure
    row["ours / transformers"] = 1 / ratio if row["cell"] == FIRST_TOKEN else ratio


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Print an error, and go on."""
    try:
        yield
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {first_line(error)}", flush=True)


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


def _their_first_token(generate: Generate, prompts: list[list[int]]) -> float:
    return generate(prompts, 1)


def _decode_cell(batch: int) -> str:
    return f"decode {batch}"


def _profiles(engine: Engine, batches: list[int]) -> list[dict[str, Any]]:
    return [
        *[_profiled(engine, batch, heat) for batch in batches for heat in (0.0, 0.6)],
        _profiled_prefill(engine, 1, LONG_PROMPT),
        _profiled_prefill(engine, max(batches), PROMPT),
    ]


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
    try:
        main()
    except SystemExit as ended:
        leave(1 if ended.code else 0)
