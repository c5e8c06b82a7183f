"""Speed of decode, prefill and loading beside llama.cpp, OpenVINO GenAI and others: bf16, Q8_0,
Q4_K_M.

    make bench-peers
    python -m bench.gguf [--rounds 5] [--format Q8_0] [--cell "decode 8"] [--folder /var/tmp/shapes]
                         [--shape mixture] [--peer OpenVINO]
    python -m bench.gguf --file model.gguf     any GGUF file, beside llama.cpp and OpenVINO
    python -m bench.gguf --types [--type IQ4_XS]    weights of every type that can be read

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

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import torch
from gguf import GGMLQuantizationType as Type

from bench.cells import CELLS, Rates, beside, cells_of, measure_cell
from bench.contestants import ours
from bench.harness import alternate, median, report, seconds
from bench.models import FORMATS, PEERS, SHAPES, Model, checkpoint, peers_of
from bench.peers.process import PeerFailed, PeerProcess
from bench.quantised_types import NAMES, TYPE_CELLS, measure_types
from worker import Engine

LOAD, LOAD_RATIO = "load", "ours / llama.cpp, seconds"
Row = dict[str, Any]


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--format", "formats", multiple=True, type=click.Choice(list(FORMATS)))
@click.option("--cell", "wanted", multiple=True, type=click.Choice([*CELLS, LOAD]))
@click.option("--shape", type=click.Choice(list(SHAPES)), default="dense", show_default=True)
@click.option("--file", "files", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--types", is_flag=True, help="Compare all quantised types, in decode and prefill.")
@click.option("--type", "kinds", multiple=True, type=click.Choice(NAMES), help="Only this type.")
@click.option("--peer", "peers", multiple=True, type=click.Choice(list(PEERS)))
@click.option("--folder", type=click.Path(path_type=Path), default=None)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(
    rounds: int,
    formats: tuple[str, ...],
    wanted: tuple[str, ...],
    shape: str,
    files: tuple[Path, ...],
    types: bool,
    kinds: tuple[str, ...],
    peers: tuple[str, ...],
    folder: Path | None,
    out: Path | None,
) -> None:
    """Measure tokens per second beside peers."""
    with tempfile.TemporaryDirectory() as temporary:
        place, title = folder or Path(temporary), SHAPES[shape][2]
        if files:
            title, measured = "GGUF files", _of_files(files, wanted, rounds)
        elif types or kinds:
            title = f"All quantised types, {SHAPES['dense'][2]}"
            chosen = [Type[name] for name in kinds or NAMES]
            cells = [cell for cell in wanted if cell != LOAD] or TYPE_CELLS
            source = checkpoint(place, "dense")
            measured = measure_types(source, chosen, cells, rounds, keep=folder is not None)
        else:
            source = checkpoint(place, shape)
            models = [Model(source, name) for name in formats or FORMATS]
            measured = _of_formats(models, peers or tuple(PEERS), wanted, rounds)
        rows = [*measured]
    title = f"{title}, {torch.get_num_threads()} threads"
    loads = [row for row in rows if LOAD_RATIO in row]
    if speeds := [row for row in rows if LOAD_RATIO not in row]:
        report(f"{title}, tokens/s", speeds, "cpu", out)
    if loads:
        report(f"{title}, seconds to load", loads, "cpu", out and out.with_stem("load"))


def _of_files(files: Sequence[Path], wanted: Sequence[str], rounds: int) -> Iterator[Row]:
    """Any GGUF files, beside llama.cpp, and OpenVINO where it loads them."""
    threads = torch.get_num_threads()
    for file in files:
        with (
            PeerProcess("llama_cpp_peer", file, threads) as llama,
            PeerProcess("openvino_peer", file, threads) as openvino,
        ):
            engine = Engine.load(str(file), max_batch=32, prefix_cache=False)
            contestants = {
                "chatjobs": ours(engine),
                "OpenVINO": openvino.seconds,
                "llama.cpp": llama.seconds,
            }
            for cell in wanted or cells_of("GGUF"):
                if cell != LOAD:
                    yield _row(file.name, cell, measure_cell(cell, contestants, rounds))
            engine.close()
            if not wanted or LOAD in wanted:
                yield _load_row(file.name, file, llama, rounds)


def _of_formats(
    models: Sequence[Model], peers: Sequence[str], wanted: Sequence[str], rounds: int
) -> Iterator[Row]:
    """A checkpoint in each format, beside its peers."""
    for model in models:
        with ExitStack() as stack:
            running = peers_of(model, peers)
            for process in running.values():
                stack.enter_context(process)
            engine = Engine.load(str(model.ours), max_batch=32, prefix_cache=False)
            contestants = {"chatjobs": ours(engine)}
            contestants |= {name: process.seconds for name, process in running.items()}
            for cell in wanted or cells_of(model.format):
                if cell != LOAD:
                    rates = measure_cell(cell, contestants, rounds)
                    yield _row(model.format, cell, dict.fromkeys(["chatjobs", *peers]) | {**rates})
            engine.close()
            measured = (not wanted or LOAD in wanted) and model.format != "bf16"
            if measured and "llama.cpp" in running:
                yield _load_row(model.format, model.gguf, running["llama.cpp"], rounds)


def _load_row(name: str, file: Path, llama: PeerProcess, rounds: int) -> Row:
    def load() -> float:
        engines: list[Engine] = []
        taken = seconds(lambda: engines.append(Engine.load(str(file))))
        engines[0].close()
        return taken

    able = {"chatjobs": load}
    try:
        llama.load()
    except PeerFailed as error:
        print(f"  llama.cpp failed: {error}", file=sys.stderr)
    else:
        able["llama.cpp"] = llama.load
    times = {who: median(values) for who, values in alternate(able, rounds).items()}
    chatjobs, llama_cpp = times["chatjobs"], times.get("llama.cpp")
    ratio = chatjobs / llama_cpp if llama_cpp else None
    return {"format": name, "chatjobs": chatjobs, "llama.cpp": llama_cpp, LOAD_RATIO: ratio}


def _row(name: str, cell: str, rates: Rates) -> Row:
    ratio = beside(rates, [who for who in rates if who != "chatjobs"])
    return {"format": name, "cell": cell, **rates, "ours / better peer": ratio}


if __name__ == "__main__":
    main()
