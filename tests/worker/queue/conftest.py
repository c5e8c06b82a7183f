from __future__ import annotations

import pytest
from rq import Queue
from rq.serializers import JSONSerializer

from jobs.store.job_store import JobStore
from tests.worker.queue.rq_jobs import QUEUE
from tests.worker.site import Site


@pytest.fixture
def store(site: Site) -> JobStore:
    return JobStore(site.redis, ["fake"], "w1", "rq:worker:w1")


@pytest.fixture
def queue(site: Site) -> Queue:
    return Queue(QUEUE, connection=site.redis, serializer=JSONSerializer)
