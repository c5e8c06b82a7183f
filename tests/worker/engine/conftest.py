from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker.checkpoints import KINDS, make_checkpoint, make_shallow_checkpoint
from worker import Engine


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shallow_checkpoint(tmp_path_factory.mktemp("model"), KINDS[request.param])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
