"""Constrained output through a real Redis and a real worker: rows, refusals and a small cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rq import Queue
from rq.serializers import JSONSerializer

from jobs.errors import InvalidRequest
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import PATIENCE, Site, wait_until
from worker.tasks import chat_completion

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "enable_thinking": False,
        "max_tokens": 400,
    }


def test_a_schema_holds_from_the_queue_to_the_row(site: Site, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    worker = site.worker(real=True, models=[str(folder)])
    job = site.submit("a person", model="m", seed=1, **form(SCHEMA))
    text = job.result(timeout=PATIENCE).text
    assert worker.stop() == 0
    row = site.row(job)
    assert (row["text"], row["finish_reason"]) == (text, "stop")
    value = json.loads(text)
    assert list(value) == ["name", "tags"] and len(value["name"]) <= 5
    assert 1 <= len(value["tags"]) <= 3 and {*value["tags"]} <= {"a", "bc"}


def test_an_unsupported_schema_is_refused_by_client_and_worker(site: Site, tmp_path: Path) -> None:
    """Another producer does not check what it enqueues."""
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    fields = form({"type": "array", "uniqueItems": True})
    with pytest.raises(InvalidRequest, match='the keyword "uniqueItems"') as caught:
        site.submit("a list", model="m", **fields)
    request = {"model": "m", "messages": [{"role": "user", "content": "a list"}], **fields}
    queue = Queue("chat:m", connection=site.redis, serializer=JSONSerializer)
    queue.enqueue(chat_completion, request=request, job_id="foreign")
    worker = site.worker(real=True, models=[str(folder)])
    wait_until(lambda: site.redis.hget("rq:job:foreign", "status") == b"failed")
    error = json.loads(site.redis.hget("rq:job:foreign", "chatjobs_error"))
    assert (error["code"], error["param"]) == ("invalid_request", "response_format")
    assert error["message"] in caught.value.message
    assert worker.stop() == 0
