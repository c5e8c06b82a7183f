"""Compiles the Triton kernels of attention for cards with little shared memory and with much, which
needs none, and prints a line for each: the kernel, the card, the channels of a head, and the bytes
of shared memory. A process of its own, since Triton's interpreter is chosen for a whole process."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker.kernels import triton_attention as attention
from worker.kernels.attention import PAGE

# Name → compute capability, and bytes of shared memory that a program may have.
CARDS = {
    "T4": (75, 65_536),
    "A100": (80, 166_912),
    "RTX 4090": (89, 101_376),
    "H100": (90, 232_448),
}
WIDTHS = (128, 256)
TENSORS = ("q", "k", "v", "keys", "values", "out", "sinks")
TYPES = {
    **{"scale": "fp32", "cap": "fp32", "partial": "*fp32", "sums": "*fp32", "pages": "*i32"},
    **dict.fromkeys(("slots", "positions", "pieces"), "*i64"),
}


def shared_memory(
    kernel: Any, capability: int, types: dict[str, str], constants: dict[str, int], warps: int
) -> int:
    """Of the kernel for arguments of these types; the others are integers."""
    types = types | dict.fromkeys(constants, "constexpr")
    function = kernel.function
    signature = {name: types.get(name, "i32") for name in function.arg_names}
    # Addresses and strides are multiples of 16, as they are at run time: loads are wider then, and
    # begin ahead.
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (at,): aligned
        for at, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.endswith(("_row", "_head", "_stride"))
    }
    source = ASTSource(function, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": warps}
    return int(triton.compile(source, target=target, options=options).metadata.shared)


def main() -> None:
    for card, (capability, memory) in CARDS.items():
        dtype = torch.float16 if capability < 80 else torch.bfloat16
        types = TYPES | dict.fromkeys(TENSORS, "*fp16" if capability < 80 else "*bf16")
        for width in WIDTHS:
            block = attention.columns(width, dtype, memory)
            sizes = {"dim": width, "width": width, "block": block, "capped": False}
            sizes["page"] = PAGE
            splits = {"most_splits": attention.SPLITS, "splits": 8, "least": attention.LEAST}
            groups = {"repeats": 4, "group": attention.GROUP, "whole": False}
            decode = sizes | splits | groups
            used = shared_memory(
                attention._attend, capability, types, decode, attention.CHUNK_WARPS
            )
            print("decode", card.replace(" ", "-"), width, used, memory, flush=True)
            sizes |= {"most": attention.tokens(width, dtype, memory), "has_sinks": False}
            used = shared_memory(
                attention._attend_pieces, capability, types, sizes, attention.CHUNK_WARPS
            )
            print("chunks", card.replace(" ", "-"), width, used, memory, flush=True)


if __name__ == "__main__":
    main()
