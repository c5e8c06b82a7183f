"""Compiles the Triton kernels of delta nets for the cards of `compile_attention`, and prints a line
for each: the kernel, the card, the channels of a head, and the bytes of shared memory that it uses
and that the card has. A process of its own, since Triton's interpreter is chosen for a whole
process."""

from __future__ import annotations

from tests.worker.kernels.compile_attention import CARDS, WIDTHS, shared_memory
from worker.kernels import triton_delta_net as delta_net

TENSORS = ("cache", "inputs", "y", "a", "b", "z", "out")
FLOATS = ("state", "weights", "weight", "log_decay", "beta", "decay", "bias", "o")
TYPES = {"slots": "*i64", "scale": "fp32", "eps": "fp32", **dict.fromkeys(FLOATS, "*fp32")}


def main() -> None:
    for card, (capability, memory) in CARDS.items():
        types = TYPES | dict.fromkeys(TENSORS, "*fp16" if capability < 80 else "*bf16")
        for dim in WIDTHS:
            width, block = delta_net.part(dim, dim)
            state = {"key_dim": dim, "value_dim": dim, "width": width, "block": block}
            kernels = {
                delta_net._convolve: (2, {"taps": 4, "block": delta_net.CHANNELS}),
                delta_net._recur: (4, state),
                delta_net._gates: (1, {"width": 32}),
                delta_net._gated_norm: (1, {"dim": dim, "width": width}),
            }
            for kernel, (warps, constants) in kernels.items():
                own = types | {"out": "*fp32"} if kernel is delta_net._recur else types
                used = shared_memory(kernel, capability, own, constants, warps)
                name = kernel.function.__name__.strip("_")
                print(name, card.replace(" ", "-"), dim, used, memory, flush=True)


if __name__ == "__main__":
    main()
