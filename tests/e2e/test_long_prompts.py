"""Prompts that are costly to tokenize, on real workers with leases that are shorter."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import JobError
from tests.worker.checkpoints import make_checkpoint
from tests.worker.panics import TRIGGER, make_fragile
from tests.worker.site import PATIENCE, Site, wait_until

CONTEXT = 1_000_000
DIGITS = 6_000_000  # more than 5 s of work if they are tokenized as a whole


def test_prompts_that_overload_the_tokenizer_fail_alone(site: Site, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", max_position_embeddings=CONTEXT)
    make_fragile(folder)
    options = {"real": True, "models": [str(folder)], "lease_seconds": 4.0}
    workers = [site.worker(**options), site.worker(**options)]
    fields = {"model": "m", "max_tokens": 100, "ignore_eos": True, "retries": 0}
    before = site.submit_many(["a", "b"], **fields)
    wait_until(lambda: all(job.status().over for job in before), "the workers did not start")
    running = site.submit_many(["c", "d"], **fields)
    long = site.submit("1" * DIGITS, **fields)
    fragile = site.submit(TRIGGER, **fields)
    after = site.submit_many(["e", "f", "g"], **fields)
    for job in (*running, *after):
        assert job.result(timeout=PATIENCE).usage.completion_tokens == 100
    with pytest.raises(JobError, match=f"and the context holds {CONTEXT}") as caught:
        long.result(timeout=PATIENCE)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(JobError, match="retry-limit-in-match") as caught:
        fragile.result(timeout=PATIENCE)
    assert caught.value.code == "invalid_request"
    assert [worker.stop() for worker in workers] == [0, 0]
    jobs = [*before, *running, long, fragile, *after]
    site.assert_settled(jobs)
    assert [site.row(job)["attempt"] for job in jobs] == [1] * len(jobs)  # no lease was lost
