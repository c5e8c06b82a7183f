"""Speed with weights of every quantised type that can be read, beside llama.cpp and beside our own
Q8_0: `python -m bench.gguf --types`.

The Qwen3-0.6B shape, with random valid blocks of the type in place of all matrices: speed does not
depend on their values, and the `gguf` package writes some of the types only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Type

from bench.cells import Rates, beside, measure_cell
from bench.contestants import ours
from bench.peers.process import PeerProcess
from bench.shapes import QWEN3_06B
from tests.worker.gguf.blocks import TYPES, make_type_file
from worker import Engine
from worker.layers.weights.storage import product_kind

NAMES = tuple(kind.name for kind in TYPES)
TYPE_CELLS = ("decode 1", "decode 16", "prefill 1 x 512")
REFERENCE = Type.Q8_0
OWN_Q8_0 = "chatjobs Q8_0"


def measure_types(
    source: Path, kinds: Sequence[Type], cells: Sequence[str], rounds: int, keep: bool
) -> Iterator[dict[str, Any]]:
    """A row of the table for each type and cell. Files of types are written beside `source`, and
    left there with `keep`. The contestants, with our own Q8_0 among them, take turns."""
    threads = torch.get_num_threads()
    reference = _engine(_file(source, REFERENCE))
    for kind in kinds:
        file = _file(source, kind)
        engine = _engine(file)
        dtype = getattr(torch, engine.info.dtype.partition(",")[0])
        how = product_kind(kind, QWEN3_06B["hidden_size"], dtype, torch.device("cpu"), False).value
        with PeerProcess("llama_cpp_peer", file, threads) as llama:
            contestants = {"chatjobs": ours(engine), "llama.cpp": llama.seconds}
            if kind is not REFERENCE:
                contestants[OWN_Q8_0] = ours(reference)
            for cell in cells:
                yield type_row(kind.name, how, cell, measure_cell(cell, contestants, rounds))
        engine.close()
        if not keep and kind is not REFERENCE:
            file.unlink()
    reference.close()


def type_row(name: str, how: str, cell: str, rates: Rates) -> dict[str, Any]:
    """The rates of one cell, and ours beside those of llama.cpp and of our Q8_0."""
    return {
        "type": name,
        "runs as": how,
        "cell": cell,
        "chatjobs": rates["chatjobs"],
        "llama.cpp": rates["llama.cpp"],
        "ours / llama.cpp": beside(rates, ["llama.cpp"]),
        "ours / our Q8_0": beside(rates, [OWN_Q8_0]) if OWN_Q8_0 in rates else 1.0,
    }


def _file(source: Path, kind: Type) -> Path:
    file = source.with_name(f"blocks-{kind.name}.gguf")
    return file if file.exists() else make_type_file(source, file, kind)


def _engine(file: Path) -> Engine:
    return Engine.load(str(file), max_batch=16, prefix_cache=False)
