"""Scoring jobs of real workers that are killed: each key has one row, with the right scores."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.worker.scoring.scores import score
from tests.worker.site import PATIENCE, Site, wait_until
from worker import Engine

PACKS, ITEMS = 8, 12


def items(pack: int) -> list[dict[str, Any]]:
    """Continuations, a choice and a text, each with a row of its own."""
    prompt = f"Sort the words: pear {pack} apple fig. " * 3
    rows: list[dict[str, Any]] = [
        {
            "type": "loglikelihood",
            "prompt": f"{prompt}{number}",
            "continuations": [" apple", " fig pear"],
        }
        for number in range(ITEMS - 2)
    ]
    rows.append({"type": "choice", "prompt": prompt, "choices": [" a", " b"], "repeat": 1})
    rows.append({"type": "perplexity", "text": prompt * 8, "window": 64, "stride": 32})
    return rows


def test_killed_workers_leave_each_key_once_with_its_scores(site: Site) -> None:
    engine = Engine.load("demo", device="cpu", dtype="fp32", max_batch=4)
    expected = {
        (pack * ITEMS + number, 1 if one.picked is not None else 0, choice): total
        for pack in range(PACKS)
        for number, one in enumerate(score(engine, *items(pack)))
        for choice, total in enumerate(sums(one))
    }
    engine.close()
    requests: Any = [
        {
            "model": "demo",
            "items": items(pack),
            "job": {"run": "r", "row": pack * ITEMS, "retries": 0, "priority": "bulk"},
        }
        for pack in range(PACKS)
    ]
    jobs = site.client.submit_many(requests)
    options = {"real": True, "models": ["demo"]}
    for ended in (1, PACKS // 2):  # at the first rows, and in the middle
        worker = site.worker(**options)
        wait_until(lambda ended=ended: count_ended(jobs) >= ended)  # type: ignore[misc]
        worker.send(signal.SIGKILL)
        worker.wait()
    last = site.worker(**options)
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    rows = site.rows("r")
    names = ("row_index", "repeat_index", "choice_index")
    found = {tuple(row[name] for name in names): row["logprob_sum"] for row in rows}
    assert len(site.written("r")) == len(rows) == len(found)
    assert found == pytest.approx(expected, abs=1e-3)
    assert {row["status"] for row in rows} == {"ok"}
    assert last.stop() == 0


def sums(item: Any) -> list[float]:
    """logprob_sum of each row of an item."""
    if item.text is not None:
        return [item.text.logprob_sum]
    if item.picked is not None:
        return [item.continuations[item.picked].logprob_sum]
    return [one.logprob_sum for one in item.continuations]


def count_ended(jobs: list[Any]) -> int:
    return sum(job.status().over for job in jobs)
