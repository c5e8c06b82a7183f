from __future__ import annotations

import pytest
from rq import Queue
from rq.serializers import JSONSerializer

from jobs.store.rq_store import RQStore
from tests.worker.queue.rq_jobs import QUEUE
from tests.worker.site import Site


@pytest.fixture
def store(site: Site) -> RQStore:
    return RQStore(site.redis, ["fake"], "w1", "rq:worker:w1")


@pytest.fixture
def queue(site: Site) -> Queue:
    return Queue(QUEUE, connection=site.redis, serializer=JSONSerializer)
