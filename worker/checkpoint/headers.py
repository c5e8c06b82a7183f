"""The weights of a model as the loader sees them: headers by tensor name, and values by name.

Two implementations: safetensors files and GGUF files, which present their tensors under the names
and shapes of safetensors files.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import torch

from worker.layers.weights.quantised_tensor import Weight

SAMPLE_BYTES = 1 << 16  # of each tensor, read for the fingerprint


@dataclass(frozen=True)
class TensorHeader:
    """One tensor's entry in a header. `begin` and `end` are byte offsets in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    blocks: bool = False  # stored in GGUF's quantised blocks


class Headers(Protocol):
    """The tensors of a model by name, as the headers of its weight files declare them."""

    @property
    def location(self) -> Path:
        """Names the model in errors."""

    @property
    def described_by(self) -> str:
        """The source of the tensors' shapes: "config.json"."""

    @property
    def tensors(self) -> Mapping[str, TensorHeader]: ...

    @property
    def readable(self) -> Container[str]:
        """The dtypes whose tensors can be read without a quantization_config."""

    def label(self, name: str) -> str:
        """The name of a tensor in the files."""

    def dtype(self, quantised: Container[str] = ()) -> torch.dtype | None:
        """The dtype of most values; None if it is a `quantised` one. Raises JobError if it isn't
        supported."""


@runtime_checkable
class Checkpoint(Headers, Protocol):
    """Headers with their values; use as a context manager. Raises JobError."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def read(self, name: str) -> Weight:
        """One tensor, where possible as a view of the mapped file; pages are read on access."""

    def fingerprint(self) -> str:
        """A hash that differs after any retraining, without reading every byte."""
