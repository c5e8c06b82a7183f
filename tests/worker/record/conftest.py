from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jobs.client.connection import connect
from tests.worker.site import Site
from worker.record.recorder import Recorder


@pytest.fixture
def make(site: Site) -> Iterator[Any]:
    """`make("a")`: a recorder with this name, to be called step by step."""
    made = []

    def recorder(name: str, **options: Any) -> Recorder:
        options = {"idle": lambda: True, "part_seconds": 0.0, "plan_seconds": 0.2, **options}
        url = options.pop("url", site.url)
        made.append(Recorder(connect(url), site.folder, name=name, **options))
        return made[-1]

    yield recorder
    for one in made:
        one._stop.set()
        one._redis.close()
