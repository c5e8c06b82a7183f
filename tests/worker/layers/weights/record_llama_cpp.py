"""Records the error of llama.cpp's own quantiser in llama_cpp_errors.json.

Run with a Python that has llama-cpp-python and gguf:

    python -m tests.worker.layers.weights.record_llama_cpp
"""

from __future__ import annotations

import ctypes
import json
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

RECORDED = Path(__file__).with_name("llama_cpp_errors.json")
TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def samples() -> dict[str, Any]:
    """Weights [512, 512] of several distributions, float32."""
    random = np.random.default_rng(0)
    shape = (512, 512)
    return {
        "normal": (random.standard_normal(shape) * 0.02).astype(np.float32),
        "heavy tails": (random.standard_t(4, shape) * 0.02).astype(np.float32),
        "uniform": random.uniform(-1, 1, shape).astype(np.float32),
        "positive": random.exponential(0.1, shape).astype(np.float32),
    }


def rms_error(values: Any, blocks: Any, kind: GGMLQuantizationType) -> float:
    error = quants.dequantize(blocks, kind).astype(np.float64) - values
    return float(np.sqrt(np.mean(error**2)))


def main() -> None:
    spec = find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None
    ggml = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libggml-base.so"))
    quantise = ggml.ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    size = ctypes.c_int64
    quantise.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        size,
        size,
        size,
        ctypes.c_void_p,
    ]
    errors: dict[str, dict[str, float]] = {}
    for name in TYPES:
        kind = GGMLQuantizationType[name]
        values_per_block, block_bytes = GGML_QUANT_SIZES[kind]
        ggml.ggml_quantize_init(int(kind))
        errors[name] = {}
        for sample, values in samples().items():
            rows, columns = values.shape
            blocks = np.zeros((rows, columns // values_per_block * block_bytes), np.uint8)
            quantise(int(kind), values.ctypes.data, blocks.ctypes.data, 0, rows, columns, None)
            errors[name][sample] = rms_error(values, blocks, kind)
    recorded = {"llama_cpp_python": distribution("llama_cpp_python").version, "errors": errors}
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
