from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.store.queue_id import read_queue_id
from tests.worker.site import QUICK, Site
from tests.worker.upstream.fake_server import FakeServer, serving
from worker.model_spec import ModelSpec
from worker.service import serve
from worker.upstream.address import Address
from worker.upstream.host import UpstreamHost

Burst = Callable[..., None]


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    """An empty Redis and an empty results folder."""
    site = Site(redis_url, tmp_path / "results")
    yield site
    site.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    yield from serving()


@pytest.fixture
def burst(site: Site, server: FakeServer) -> Burst:
    """Serve the queue `fake` by the model `there` of the server, until it is empty."""

    def run(max_batch: int | None = None, key: str = "", **options: Any) -> None:
        environ = {"CHATJOBS_UPSTREAM_API_KEY": key} if key else {}
        host = UpstreamHost(Address.parse(server.url, environ), read_queue_id(site.redis))
        spec = ModelSpec(reference="there", aliases=("fake",), max_batch=max_batch)
        options = {**QUICK, "burst": True, "redis_url": site.url, "results": site.folder, **options}
        serve(host, [spec], **options)

    return run
