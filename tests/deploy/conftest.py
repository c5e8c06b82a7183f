"""A Redis, a results folder and workers for the tests of shipped files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.site import Site


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    site = Site(redis_url, tmp_path / "results")
    yield site
    site.close()
