"""Formats and orders of exported runs. The command line names them without importing pyarrow."""

from __future__ import annotations

from typing import Literal, get_args

Format = Literal["jsonl", "csv", "parquet", "openai-batch"]
FORMATS: tuple[Format, ...] = get_args(Format)
TEXT_FORMATS: tuple[Format, ...] = ("jsonl", "csv")  # that can be written to a pipe

Order = Literal["input", "done"]  # of the data set, or in which its rows have ended
ORDERS: tuple[Order, ...] = get_args(Order)
SUFFIXES: dict[Format, str] = {  # of their files
    "jsonl": ".jsonl",
    "csv": ".csv",
    "parquet": ".parquet",
    "openai-batch": ".jsonl",
}
