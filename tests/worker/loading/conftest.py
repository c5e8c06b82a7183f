"""Model folders that tests may damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.worker.checkpoints import split


@pytest.fixture(scope="module")
def sharded_original(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(original, tmp_path_factory.mktemp("sharded") / "tiny"))
    split(folder, 3)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of a valid model folder, to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    split(folder, 3)
    return folder
