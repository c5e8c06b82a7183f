"""ik_llama.cpp, a fork of llama.cpp with kernels of its own, as a child process; see protocol.py.
The package's wheel is built for AVX2."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from ik_llama_cpp import _ctypes_api as functions

from bench.peers.low_level import LowLevel
from bench.peers.protocol import Answer, run


class Api:
    """The functions of the fork under llama.cpp's names of today."""

    def __getattr__(self, name: str) -> Any:
        return getattr(functions, name)

    def llama_get_memory(self, context: Any) -> Any:
        return context

    def llama_memory_clear(self, context: Any, data: bool) -> None:
        functions.llama_kv_cache_clear(context)

    def llama_init_from_model(self, model: Any, params: Any) -> Any:
        # With several sequences its flash attention ends in GGML_ASSERT(S > 0).
        params.flash_attn = params.n_seq_max == 1
        return functions.llama_init_from_model(model, params)


def start(path: str, threads: int) -> tuple[str, dict[str, Answer]]:
    return version("ik-llama-cpp-python"), LowLevel(Api(), path, threads).answers


if __name__ == "__main__":
    run(start)
