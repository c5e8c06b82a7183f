"""Values that other programs have written into the keys of chatjobs affect what they belong to."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import keys
from tests.worker.site import Site, wait_until
from worker.queue.rq_store import RQStore
from worker.queue.rq_workers import RQWorkers


@pytest.mark.parametrize("score", ["inf", "-inf", "1e300"])
def test_a_foreign_lease_is_left_out_and_named(
    site: Site, score: str, caplog: pytest.LogCaptureFixture
) -> None:
    workers = RQWorkers(site.url, "w1", [], patience=5.0)
    site.redis.zadd(keys.WORKERS, {"w1": 7, "odd": score, b"\xff": 8})
    assert workers.leases() == workers.leases() == {"w1": 7}
    workers.close()
    named = [one.getMessage() for one in caplog.records]
    assert len(named) == 2  # not at each look
    assert all("chatjobs:workers" in one and "ZREM" in one for one in named)


@pytest.mark.parametrize("value", [b"x", b'{"a":1}', b'["a","b","c"]', b"[1,2]", b"\xff", None])
def test_a_foreign_backlog_is_counted_again(site: Site, store: RQStore, value: Any) -> None:
    site.redis.sadd(keys.OUTBOXES, "r1", "r2")
    site.redis.xadd(keys.outbox("r1"), {"row": "x"})
    site.redis.set(keys.outbox("r2"), "no stream")
    if value is None:
        site.redis.rpush(keys.BACKLOG, "no string")
    else:
        site.redis.set(keys.BACKLOG, value)
    assert store.backlog().rows == 1
    assert store.backlog() == store.backlog()


def test_a_stage_that_fails_is_named_and_works_again(site: Site) -> None:
    worker = site.worker()
    site.submit().result(timeout=60)
    site.redis.set("rq:scheduled:chat:fake", "no sorted set")
    site.redis.rpush("rq:queue:chat:fake", "wakes the claim")
    wait_until(lambda: "rq:scheduled:chat:fake" in worker.output)
    assert "RENAME" in worker.output
    site.redis.rename("rq:scheduled:chat:fake", "elsewhere")
    assert site.submit().result(timeout=60).text
    assert worker.alive
    assert worker.output.count("rq:scheduled:chat:fake in Redis is") == 1
