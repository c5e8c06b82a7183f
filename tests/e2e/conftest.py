from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.site import Site


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    """An empty Redis and an empty results folder."""
    site = Site(redis_url, tmp_path / "results")
    yield site
    site.close()
