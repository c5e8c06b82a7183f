"""The weights of a GGUF model: its tensors under the names of safetensors files."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from jobs.errors import JobError
from worker.checkpoint.headers import SAMPLE_BYTES, TensorHeader
from worker.checkpoint.quantization import DEQUANTISED
from worker.gguf.read.header import Tensors
from worker.gguf.read.tensors import TensorMap
from worker.gguf.tensor_format import DENSE, READABLE_NAMES
from worker.layers.weights.quantised_tensor import Weight
from worker.processes.pages import ReadPages, release


class GgufHeaders:
    """Implements Headers. `stored` are the tensors of all parts of the file."""

    described_by = "metadata"
    readable = READABLE_NAMES

    def __init__(self, location: Path, stored: Tensors, tensor_map: TensorMap) -> None:
        self.location, self._stored, self._tensor_map = location, stored, tensor_map
        self._views = tensor_map.views()
        self.tensors: Mapping[str, TensorHeader] = {
            name: view.header for name, view in self._views.items()
        }

    def label(self, name: str) -> str:
        return self._tensor_map.label(name)

    def dtype(self, quantised: Container[str] = ()) -> torch.dtype | None:
        """Quantised weights run in bfloat16 by default."""
        sizes: dict[GGMLQuantizationType, int] = {}
        for tensor in self._stored.values():
            sizes[tensor.type] = sizes.get(tensor.type, 0) + prod(tensor.shape)
        return DENSE.get(max(sizes, key=lambda kind: sizes[kind]), DEQUANTISED)


class GgufCheckpoint(GgufHeaders):
    """Implements Checkpoint. Each part is mapped when a tensor of it is first read."""

    def __init__(self, location: Path, stored: Tensors, tensor_map: TensorMap) -> None:
        super().__init__(location, stored, tensor_map)
        self._files: dict[Path, Tensor] = {}
        self._pages = ReadPages()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        release(self._files)
        self._files = {}

    def read(self, name: str) -> Weight:
        header = self.tensors[name]
        self._pages.reading(name, header.end - header.begin, self._files)
        return self._views[name].read(self._map(header.file))

    def fingerprint(self) -> str:
        """A hash of each tensor's name, type, shape and first 64 KiB."""
        digest = hashlib.sha256()
        for name, stored in sorted(self._stored.items()):
            digest.update(f"{name}|{stored.type.name}|{stored.shape}|".encode())
            with open(stored.file, "rb") as file:
                file.seek(stored.begin)
                digest.update(file.read(min(SAMPLE_BYTES, stored.end - stored.begin)))
        return digest.hexdigest()[:32]

    def _map(self, file: Path) -> Tensor:
        if file not in self._files:
            self._files[file] = map_file(file)
        return self._files[file]


def map_file(path: Path) -> Tensor:
    """The bytes of a file, mapped: pages are read on access. Raises JobError."""
    try:
        return torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        fact = str(error).splitlines()[0]
        raise JobError("unsupported_model", f"{path} cannot be read: {fact}") from None
