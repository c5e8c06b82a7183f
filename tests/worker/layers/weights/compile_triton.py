"""Compiles the Triton kernels of products for cards with little shared memory and with much, which
needs none, and prints a line for each: the kernel, the card, the format, the bytes of machine
code, and the bytes of shared memory that it uses and that the card has. A process of its
own, since Triton's interpreter is chosen for a whole process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.worker.kernels.compile_attention import CARDS
from worker.kernels import planes, triton_dense
from worker.kernels import triton_products as products

HIGH = {4: "*u8", 5: "*u8", 6: "*i16", 8: "*u8"}  # the type of `Planes.high`, by the bits


def compiled(kernel: Any, capability: int, constants: dict[str, Any], **pointers: str) -> Any:
    """All arguments but `pointers` and `constants` are integers. As for most models, addresses and
    sizes are divisible by 16: Triton then reads ahead through shared memory."""
    function = kernel.function
    types = {
        name: "constexpr" if name in constants else pointers.get(name, "i32")
        for name in function.arg_names
    }
    divisible = {
        (at,): [["tt.divisibility", 16]]
        for at, parameter in enumerate(function.params)
        if parameter.name in pointers
        or (parameter.name not in constants and not parameter.do_not_specialize)
    }
    source = ASTSource(function, types, constants, divisible)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


def show(card: str, memory: int, kernel: str, name: str, code: Any) -> None:
    print(kernel, card, name, len(code.asm["cubin"]), code.metadata.shared, memory, flush=True)


def main() -> None:
    for card, (capability, memory) in CARDS.items():
        line = partial(show, card.replace(" ", "-"), memory)
        dtype = "fp16" if capability < 80 else "bf16"
        ends = {name: f"*{dtype}" for name in ("x", "y", "weight", "bias", "output")}
        # A T4 does not read ahead, so that rows take no shared memory; more compile for minutes.
        rows = products.LEAST_ROWS if capability < 80 else products.MAX_ROWS
        magic = products.MAGIC[torch.float16 if capability < 80 else torch.bfloat16]
        for name, form in planes.FORMATS.items():
            constants = {
                **{"bits": form.bits, "part": form.part, "offset": form.offset},
                **{"minima": form.minima, "supers_": form.supers},
            }
            pointers = {
                **ends,
                **{"low": "*i8" if form.bits == 8 else "*i32", "high": HIGH[form.bits]},
                **{"scales": "*i32", "halves": "*fp16", "supers": "*fp16"},
                **{"partial": "*fp32", "arrived": "*i32"},
            }
            most = {"magic": magic, "even": True, "most_rows": rows, "tile": planes.TILE}
            most |= constants
            alone = most | {"split": True}
            line("product", name, compiled(products._product, capability, alone, **pointers))
            several = most | {"width": 128}
            pointers["counts"] = "*i64"
            code = compiled(products._grouped_product, capability, several, **pointers)
            line("experts", name, code)
            constants["tile"] = 16
            code = compiled(products._dequantise, capability, constants, **pointers)
            line("dequantise", name, code)
        own = {"biased": True, "tile": triton_dense.TILE}
        own |= {"width": triton_dense.WIDTH, "run": triton_dense.RUN}
        line("dense", "plain", compiled(triton_dense._product, capability, own, **ends))


if __name__ == "__main__":
    main()
