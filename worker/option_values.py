"""The values that options of commands and of worker.toml may have, and defaults of theirs.

A leaf without imports of torch or gguf, so that `--help` and the modules that give the values their
meaning read them from one place.
"""

from __future__ import annotations

from typing import Literal, get_args

# All names of each dtype.
FLOAT32 = ("fp32", "float32", "float")
FLOAT16 = ("fp16", "float16", "half")
BFLOAT16 = ("bf16", "bfloat16")
DTYPES = (*BFLOAT16, *FLOAT16, *FLOAT32)

# Of GGUF files that are written, by llama.cpp's names.
GGUF_KINDS = (
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q4_K_M", "Q4_K_S", "Q5_1", "Q5_0", "Q4_1", "Q4_0"),
    *("BF16", "F16"),
)

ToolParser = Literal["hermes", "llama3_json", "pythonic", "qwen3_coder"]
TOOL_PARSERS: tuple[ToolParser, ...] = get_args(ToolParser)

MOST_DRAFT_TOKENS = 32  # of a proposal

# Kubernetes kills 30 s after SIGTERM: the jobs have been returned and their rows written by then.
GRACE_SECONDS = 25
STATE_BYTES = 8 * 2**30  # in a state folder
