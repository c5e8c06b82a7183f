"""Compiles the Triton kernels for GPUs, which needs none, and prints a line for each. A process of
its own, since Triton's interpreter is chosen for a whole process."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker.kernels import triton_products as products

TARGETS = {80: "fp32", 90: "bf16"}  # A100, H100, and the dtype to compile for


def compiled(kernel: Any, capability: int, constants: dict[str, int], **pointers: str) -> bytes:
    """The machine code. All arguments but `pointers` and `constants` are integers."""
    types = {
        name: "constexpr" if name in constants else pointers.get(name, "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, types, constants)
    code: bytes = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
    return code


def main() -> None:
    for capability, dtype in TARGETS.items():
        for name, form in products.FORMATS.items():
            blocks, shape = {"blocks": "*u8", "halves": "*fp16"}, form.constants
            most = {**shape, "most_rows": products.LEAST_ROWS}
            ends = {"x": f"*{dtype}", "y": f"*{dtype}"}
            code = compiled(products._product.function, capability, most, **ends, **blocks)
            print("product", capability, name, len(code), flush=True)
            ends = {"output": f"*{dtype}"}
            code = compiled(products._dequantise.function, capability, shape, **ends, **blocks)
            print("dequantise", capability, name, len(code), flush=True)


if __name__ == "__main__":
    main()
