"""The formats of exported runs. The command line names them without importing pyarrow."""

from __future__ import annotations

from typing import Literal, get_args

Format = Literal["jsonl", "csv", "parquet", "openai-batch"]
FORMATS: tuple[Format, ...] = get_args(Format)
TEXT_FORMATS: tuple[Format, ...] = ("jsonl", "csv")  # that can be written to a pipe
