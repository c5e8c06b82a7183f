"""Products of the layers and the head of Qwen3-0.6B and 8B on a GPU, by type of the weights.

    python -m bench.gpu_products [--shape 0.6B] [--type bf16] [--rows 1,16] [--part layer]

CUDA graphs repeat the products over sets of random weights that are larger than the L2 cache
together. Each line has the microseconds of one set by our kernels and by torch with the plain
weights in bf16, the GB/s of our weights' bytes, and their ratio to a large copy, which reads and
writes. Our product is compared with float64; an error that is too large ends the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import click
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from torch.nn import functional as F

from bench.gpu_models import copy_bandwidth
from bench.harness import median
from worker.kernels import planes
from worker.layers.weights.dense import DenseWeight
from worker.layers.weights.quantised_tensor import QuantisedTensor
from worker.layers.weights.triton import TritonWeight

# Outputs and columns of the products of a layer (q, k and v; o; gate and up; down), and the head.
LAYERS = {
    "0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "8B": [(6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288)],
}
HEADS = {"0.6B": (151_936, 1024), "8B": (151_936, 4096)}
TYPES = ("bf16", *planes.FORMATS)
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # bytes of a block; else 0
CACHED = 200 << 20  # bytes, more than any L2 cache
NEAR = 1e-2  # relative error of a product in bf16
COMPARED = 4096  # outputs
REPLAYS = 30

DEVICE = torch.device("cuda")
Product = Callable[[], Tensor]


def random_blocks(name: str, outputs: int, columns: int) -> QuantisedTensor:
    form = planes.FORMATS[name]
    shape = (outputs, columns // form.values, form.size)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    if name == "MXFP4":
        blocks[..., 0] = 120  # the exponent of a scale
        return QuantisedTensor(Type[name], (outputs, columns), blocks.flatten(1))
    for at in SCALES.get(name, (0,)):
        scale = torch.rand(shape[:2], device=DEVICE) * 2**-8 + 2**-9
        blocks[..., at : at + 2] = scale.half()[..., None].view(torch.uint8)
    return QuantisedTensor(Type[name], (outputs, columns), blocks.flatten(1))


def products(kind: str, shape: tuple[int, int], rows: int, sets: int) -> list[list[Product]]:
    """Of so many weights, by our kernels and by torch with the plain weights."""
    x = torch.randn(rows, shape[1], device=DEVICE, dtype=torch.bfloat16)
    ours: list[Product] = []
    torchs: list[Product] = []
    for number in range(sets):
        if kind == "bf16":
            plain = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
            ours.append(partial(DenseWeight(plain), x, None))
            exact = plain
        else:
            blocks = random_blocks(kind, *shape)
            ours.append(partial(TritonWeight([blocks]), x, None))
            exact = blocks[:COMPARED].dequantise(torch.float32)
            plain = blocks.dequantise(torch.bfloat16)
        torchs.append(partial(F.linear, x, plain))
        if number == 0:
            require_near(ours[0]()[:, :COMPARED], x, exact[:COMPARED])
    return [ours, torchs]


def require_near(found: Tensor, x: Tensor, weight: Tensor) -> None:
    expected = x.double() @ weight.double().T
    error = float((found.double() - expected).norm() / expected.norm())
    if not error < NEAR:
        raise click.ClickException(f"a product differs from float64 by {error:.1e} of its length")


def seconds_of(several: list[Product]) -> float:
    """Of all products in one CUDA graph."""
    for product in several:
        product()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in several:
            product()
    times = []
    for _ in range(REPLAYS):
        begin, finish = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        finish.record()
        finish.synchronize()
        times.append(begin.elapsed_time(finish) / 1e3)
    return median(times)


@click.command()
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(LAYERS)))
@click.option("--type", "types", multiple=True, type=click.Choice(TYPES))
@click.option("--rows", "rows_", default="1,4,16,32,64,256", show_default=True)
@click.option("--part", "parts", multiple=True, type=click.Choice(["layer", "head"]))
def main(
    shapes: tuple[str, ...], types: tuple[str, ...], rows_: str, parts: tuple[str, ...]
) -> None:
    """Print a line for each shape, type, part and number of rows."""
    torch.manual_seed(0)
    copy = copy_bandwidth(DEVICE, 1 << 31)
    print(f"{torch.cuda.get_device_name()}, copy {copy / 1e9:,.0f} GB/s")
    print("shape type part rows: ours µs, torch µs, GB/s of our weights, ratio to the copy")
    for shape in shapes or tuple(LAYERS):
        for kind in types or TYPES:
            for part in parts or ("layer", "head"):
                for rows in map(int, rows_.split(",")):
                    line = measured(shape, kind, part, rows, copy)
                    print(f"{shape} {kind} {part} {rows}: {line}", flush=True)
                    torch.cuda.empty_cache()


def measured(shape: str, kind: str, part: str, rows: int, copy: float) -> str:
    dims = LAYERS[shape] if part == "layer" else [HEADS[shape]]
    form = planes.FORMATS.get(kind)
    nbytes = sum(n * k for n, k in dims) * (2.0 if form is None else form.size / form.values)
    sets = int(CACHED / nbytes) + 2
    by_shape = [products(kind, dim, rows, sets) for dim in dims]
    ours, torchs = (
        seconds_of([product for one in by_shape for product in one[who]]) / sets for who in (0, 1)
    )
    rate = nbytes / ours
    return f"{ours * 1e6:.1f}, {torchs * 1e6:.1f}, {rate / 1e9:,.0f}, {rate / copy:.3f}"


if __name__ == "__main__":
    main()
