"""Speed of decode, prefill and loading beside llama.cpp and OpenVINO GenAI: bf16, Q8_0, Q4_K_M.

    make bench-peers
    python -m bench.gguf [--rounds 5] [--format Q8_0] [--cell "decode 8"] [--folder /var/tmp/shapes]
                         [--shape mixture]
    python -m bench.gguf --file model.gguf     any GGUF file, beside llama.cpp

A Qwen3-0.6B shape with random weights, or a mixture of experts; our own quantiser makes the GGUF
files, and llama.cpp reads the same files. OpenVINO's model is exported from the same checkpoint
(fp16, which it runs in bf16, int8, int4). Decode-only tokens per second: prompts of 64 tokens, the
time of 34 new tokens less the time of two, so that the context is 66 to 97. Prefill: prompt tokens
per second of one new token. Load: seconds from the file, which the system's page cache holds, until
the model is ready; it is measured of files in formats of GGUF, beside llama.cpp. All contestants
take turns in one run, with as many threads as torch has. A peer that ends with an error in a cell
is left out there. With --folder, files and exports are kept for further runs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from bench.contestants import Generate, decode_rate, ours, prefill_rate, random_prompts
from bench.harness import alternate, median, report, seconds
from bench.peers.process import PeerFailed, PeerProcess, export_openvino
from bench.shapes import QWEN3_06B, QWEN3_MOE, random_checkpoint
from worker import Engine

PROMPT = 64
SMALLEST_VOCABULARY = 1000  # token ids that every contestant has
CELLS: dict[str, tuple[int, int, bool]] = {  # batch, prompt length, whether prefill is measured
    **{f"decode {batch}": (batch, PROMPT, False) for batch in (1, 8, 16, 32)},
    "prefill 16 x 64": (16, 64, True),
    "prefill 1 x 512": (1, 512, True),
}
LOAD = "load"
SHAPES = {  # family, fields, title
    "dense": ("qwen3", QWEN3_06B, "Qwen3-0.6B shape"),
    "mixture": ("qwen3_moe", QWEN3_MOE, "Qwen3-MoE shape, 128 experts"),
}
FORMATS = {"bf16": ("BF16", "fp16"), "Q8_0": ("Q8_0", "int8"), "Q4_K_M": ("Q4_K_M", "int4")}


def quantise(source: Path, kind: str, target: Path) -> Path:
    """A GGUF file made by `chatjobs models quantize`, or an earlier one."""
    if target.exists():
        return target
    chatjobs = str(Path(sys.executable).with_name("chatjobs"))
    command = [chatjobs, "models", "quantize", str(source), "--type", kind, "-o", str(target)]
    subprocess.run(command, check=True)
    return target


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--format", "formats", multiple=True, type=click.Choice(list(FORMATS)))
@click.option("--cell", "wanted", multiple=True, type=click.Choice([*CELLS, LOAD]))
@click.option("--shape", type=click.Choice(list(SHAPES)), default="dense", show_default=True)
@click.option("--file", "files", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--folder", type=click.Path(path_type=Path), default=None)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(
    rounds: int,
    formats: tuple[str, ...],
    wanted: tuple[str, ...],
    shape: str,
    files: tuple[Path, ...],
    folder: Path | None,
    out: Path | None,
) -> None:
    """Measure tokens per second: chatjobs, llama.cpp, OpenVINO GenAI."""
    rows: list[dict[str, Any]] = []
    loads: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    for file in files:
        with PeerProcess("llama_cpp_peer.py", file, threads) as llama:
            engine = Engine.load(str(file), max_batch=32, prefix_cache=False)
            contestants = {"chatjobs": ours(engine), "llama.cpp": llama.seconds}
            for cell in wanted or CELLS:
                if cell != LOAD:
                    rows.append(_row(file.name, cell, contestants, rounds))
            engine.close()
            if not wanted or LOAD in wanted:
                loads.append({"format": file.name, **_load_row(file, llama, rounds)})
    if files:
        _report(f"{len(files)} files, {threads} threads", rows, loads, out)
        return
    with tempfile.TemporaryDirectory() as temporary:
        family, fields, title = SHAPES[shape]
        base = (folder or Path(temporary)) / shape
        source = base / "checkpoint"
        if not source.exists():
            random_checkpoint(source, family, fields)
        for name in formats or FORMATS:
            gguf_type, ov_format = FORMATS[name]
            file = quantise(source, gguf_type, base / f"{gguf_type}.gguf")
            exported = export_openvino(source, ov_format, base / ov_format)
            with ExitStack() as stack:
                path = source if name == "bf16" else file
                engine = Engine.load(str(path), max_batch=32, prefix_cache=False)
                llama = stack.enter_context(PeerProcess("llama_cpp_peer.py", file, threads))
                openvino = stack.enter_context(PeerProcess("openvino_peer.py", exported, threads))
                contestants = {
                    "chatjobs": ours(engine),
                    "llama.cpp": llama.seconds,
                    "OpenVINO": openvino.seconds,
                }
                for cell in wanted or CELLS:
                    if cell != LOAD:
                        rows.append(_row(name, cell, contestants, rounds))
                engine.close()
                if name != "bf16" and (not wanted or LOAD in wanted):
                    loads.append({"format": name, **_load_row(file, llama, rounds)})
    _report(f"{title}, {threads} threads", rows, loads, out)


def _report(
    title: str, rows: list[dict[str, Any]], loads: list[dict[str, Any]], out: Path | None
) -> None:
    if rows:
        report(f"{title}, tokens/s", rows, "cpu", out)
    if loads:
        report(f"{title}, seconds to load", loads, "cpu", out and out.with_stem("load"))


def _load_row(file: Path, llama: PeerProcess, rounds: int) -> dict[str, Any]:
    def load() -> float:
        engines: list[Engine] = []
        taken = seconds(lambda: engines.append(Engine.load(str(file))))
        engines[0].close()
        return taken

    times = alternate({"chatjobs": load, "llama.cpp": llama.load}, rounds)
    chatjobs, llama_cpp = map(median, times.values())
    return {"chatjobs": chatjobs, "llama.cpp": llama_cpp, "ours / llama.cpp": chatjobs / llama_cpp}


def _row(name: str, cell: str, contestants: dict[str, Generate], rounds: int) -> dict[str, Any]:
    """The medians of one cell; None for a peer that can't run it."""
    batch, length, prefill = CELLS[cell]
    prompts = random_prompts(batch, length, SMALLEST_VOCABULARY)
    medians: dict[str, Any] = dict.fromkeys(contestants)
    able = {}
    for who, generate in contestants.items():
        try:
            generate(prompts, 1 if prefill else 2)
        except PeerFailed as error:
            print(f"  {who} failed: {error}", file=sys.stderr)
        else:
            able[who] = partial(prefill_rate if prefill else decode_rate, generate, prompts)
    medians |= {who: median(values) for who, values in alternate(able, rounds).items()}
    best = max(value or 0.0 for who, value in medians.items() if who != "chatjobs")
    ratio = medians["chatjobs"] / best if best else None
    return {"format": name, "cell": cell, **medians, "ours / better peer": ratio}


if __name__ == "__main__":
    main()
