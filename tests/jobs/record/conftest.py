from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.record.folder import claim_folder
from jobs.record.recorder import Recorder
from jobs.store.connection.connect import connect
from tests.disks import Disk
from tests.worker.site import PATIENCE, Site


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    """An empty Redis and an empty results folder."""
    site = Site(redis_url, tmp_path / "results")
    yield site
    site.close()


@pytest.fixture
def make(site: Site) -> Iterator[Any]:
    """`make("a")`: a recorder with this name, to be called step by step."""
    made = []

    def recorder(name: str, **options: Any) -> Recorder:
        options = {"idle": lambda: True, "part_seconds": 0.0, "plan_seconds": 0.2, **options}
        url = options.pop("url", site.url)
        made.append(
            Recorder(connect(url), claim_folder(site.redis, site.folder), name=name, **options)
        )
        return made[-1]

    yield recorder
    for one in made:
        one._stop.set()
        one._woken.set()
    for one in made:
        if one._thread.ident is not None:  # else its thread was not started
            one._thread.join(PATIENCE)
        one._redis.close()


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """`make_disk(mount, size="1m")`: a disk at that path."""
    made: list[Disk] = []

    def make(mount: Path, size: str | None = None) -> Disk:
        made.append(Disk(mount, tmp_path / f"disk-{len(made)}", size))
        return made[-1]

    yield make
    for disk in reversed(made):
        disk.close()
