from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.worker.checkpoints import make_checkpoint, split
from tests.worker.site import Site


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Each test draws the same values in each run, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    """An empty Redis and an empty results folder."""
    site = Site(redis_url, tmp_path / "results")
    yield site
    site.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid model folder. Tests that damage it make a copy."""
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=1)


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
