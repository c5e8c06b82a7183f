"""One small model as a GGUF file, and the checkpoint that it was made from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.worker.checkpoints import make_checkpoint
from tests.worker.gguf.converter import convert


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of whole blocks, so that its matrices can be quantised."""
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    return make_checkpoint(folder, num_hidden_layers=1, intermediate_size=64)


@pytest.fixture(scope="package")
def original(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(checkpoint, tmp_path_factory.mktemp("gguf") / "tiny-F32.gguf")


@pytest.fixture
def file(original: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copy(original, tmp_path / "tiny-F32.gguf"))
