"""The peak memory of jobs through a real Redis and a real worker: results and rows."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from jobs import ScoreRequest
from jobs.store.rq_layout import results_key
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import PATIENCE, Site


def test_results_and_rows_have_the_peak_memory_of_their_job(site: Site, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    worker = site.worker(real=True, models=[str(folder)])
    chat = site.submit("Rain?", model="m", max_tokens=4, n=2)
    item: Any = {"type": "loglikelihood", "prompt": "one", "continuations": [" two", " three"]}
    scores = site.client.submit(ScoreRequest(model="m", items=[item]))
    found = []
    for job in (chat, scores):
        usage = job.result(timeout=PATIENCE).usage
        assert usage is not None and usage.peak_memory_mb is not None
        found.append(usage.peak_memory_mb)
    assert min(found) > 50  # torch alone is more
    # Clients of 0.2.0 refuse a completion with another field.
    ((_, entry),) = site.redis.xrevrange(results_key(chat.id))
    written = json.loads(base64.b64decode(entry[b"return_value"]))
    assert "peak_memory_mb" not in written["usage"]
    assert worker.stop() == 0
    rows = {(row["job_id"], row["peak_memory_mb"]) for row in site.rows()}
    assert rows == {(chat.id, found[0]), (scores.id, found[1])}


def test_a_job_that_never_ran_has_none(site: Site) -> None:
    job = site.submit("hello", model="m")
    job.cancel()
    worker = site.worker()
    assert worker.stop() == 0
    assert site.row(job)["peak_memory_mb"] is None
