"""Shared by the tests with RQ: a queue's name, and jobs as RQ reads them."""

from __future__ import annotations

from typing import Any

from rq.job import Job as RQJob
from rq.serializers import JSONSerializer

from jobs.client.job import Job
from tests.worker.site import Site

QUEUE = "chat:fake"


def fetch(site: Site, job: Job[Any, Any]) -> RQJob:
    return RQJob.fetch(job.id, connection=site.redis, serializer=JSONSerializer)
