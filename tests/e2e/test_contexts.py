"""Real workers with different contexts serve one queue: see also test_longer_workers.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs.operations import CHAT
from jobs.store.worker_status import read_statuses
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import PATIENCE, Site, wait_until

SHORT, LONG = 64, 512
LONG_PROMPT = "word " * 80
ANSWER: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def item(prompt: str) -> dict[str, Any]:
    return {"type": "loglikelihood", "prompt": prompt, "continuations": [" word", " words"]}


def test_long_chats_scoring_jobs_and_turns_end_at_the_longer_worker(
    site: Site, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1, max_position_embeddings=LONG)
    options: dict[str, Any] = {"real": True, "models": [str(folder)]}
    workers = [site.worker(**options, context=SHORT)]
    wait_until(lambda: read_statuses(site.redis).contexts("m", CHAT.func))
    site.client.serving = None
    session = site.client.session(model="m", **ANSWER)
    session.send("a", timeout=PATIENCE)
    alone: Any = {"model": "m", "items": [item("a"), item(LONG_PROMPT)]}
    result = site.client.submit(alone).result(timeout=PATIENCE)
    codes = [one.error and one.error["code"] for one in result.items]
    assert codes == [None, "context_length_exceeded"]

    workers.append(site.worker(**options, context=LONG))
    wait_until(lambda: len(read_statuses(site.redis).contexts("m", CHAT.func)) == 2)
    names = {
        tokens: name for name, tokens in read_statuses(site.redis).contexts("m", CHAT.func).items()
    }
    items = [item("a"), item(LONG_PROMPT), item("b"), item("word " * 2000)]
    requests: Any = [
        {"model": "m", "items": items, "job": {"run": "r", "row": 4 * number, "retries": 0}}
        for number in range(6)
    ]
    packs = site.client.submit_many(requests)
    chats = [site.submit(LONG_PROMPT, model="m", **ANSWER) for _ in range(6)]
    least: dict[str, Any] = {"min_tokens": SHORT, "max_tokens": SHORT, "temperature": 0}
    chats += [site.submit("a", model="m", **least) for _ in range(6)]
    turns = [session.submit(LONG_PROMPT)]
    turns[0].result(timeout=PATIENCE)
    turns.append(session.submit("b"))
    counts = [job.result(timeout=PATIENCE).usage.completion_tokens for job in chats]
    assert counts == [4] * 6 + [SHORT] * 6
    turns[1].result(timeout=PATIENCE)
    assert len(session.history()) == 6
    site.client.wait_for_rows([*packs, *chats, *turns], timeout=PATIENCE)
    assert [worker.stop() for worker in workers] == [0, 0]
    rows = [site.row(job) for job in (*chats, *turns)] + site.rows("r")
    assert {row["worker_id"] for row in rows} == {names[LONG]}
    assert {row["attempt"] for row in rows} == {1}
    failed = {row["row_index"] for row in site.rows("r") if row["status"] != "ok"}
    assert failed == {4 * number + 3 for number in range(6)}
    assert len(site.written("r")) == len(site.rows("r"))
