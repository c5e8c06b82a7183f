"""Many jobs in one call of the script: each is enqueued, or refused, as if it were alone."""

from __future__ import annotations

import select
import socket
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from jobs import Client, JobError, keys
from jobs.operations import parse_request
from jobs.store.enqueue import SCRIPT_JOBS, Enqueued, enqueue
from jobs.store.rq_layout import job_key, queue_key

LINE = queue_key(keys.chat_queue("demo"))


def request(job_id: str | None, text: str = "hi", **job: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return parse_request({"model": "demo", "messages": messages, "job": {"id": job_id, **job}})


def sent(client: Client, requests: list[Any]) -> tuple[list[str], int]:
    """For each request "new", "same" or the code of its error, and the number of scripts."""
    client.redis.config_resetstat()
    found = enqueue(client.redis, requests)
    scripts = client.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    ends = [
        one.code if isinstance(one, JobError) else "same" if one.existed_before else "new"
        for one in found
    ]
    return ends, scripts


def waiting(client: Client, line: str = LINE) -> list[str]:
    found: Any = client.redis.lrange(line, 0, -1)
    return [one.decode() for one in found]


def test_one_script_enqueues_many_jobs_in_order(client: Client) -> None:
    client.submit(request("first"))  # loads the script
    names = [f"job-{number}" for number in range(2 * SCRIPT_JOBS)]
    ends, scripts = sent(client, [request(name) for name in names])
    assert (set(ends), scripts) == ({"new"}, 2)
    assert waiting(client) == ["first", *names]
    assert client.redis.llen(keys.wake(keys.chat_queue("demo"))) == SCRIPT_JOBS


def test_a_script_has_a_bounded_number_of_bytes_and_rows(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(request("first"))
    monkeypatch.setattr("jobs.store.enqueue.SCRIPT_BYTES", 1000)
    _, scripts = sent(client, [request(f"job-{number}", "x" * 300) for number in range(5)])
    assert scripts == 3  # two of more than 400 bytes each, and one
    monkeypatch.setattr("jobs.store.enqueue.SCRIPT_ROWS", 10)
    items = [{"type": "perplexity", "text": "a", "row": row} for row in range(4)]
    scores = [{"model": "demo", "items": items, "job": {"run": run}} for run in "abc"]
    ends, scripts = sent(client, [parse_request(one) for one in scores])
    assert (ends, scripts) == (["new"] * 3, 2)


def test_a_refused_job_does_not_touch_the_others_of_its_script(client: Client) -> None:
    client.submit(request("taken", "another"))
    client.submit(request("same"))
    client.redis.hset(keys.LIMITS, "message_bytes", 100)
    client.redis.hset(keys.LIMITS, "jobs:demo", 5)
    names = ["a", "taken", "same", "b", "c", "d"]
    requests = [request(name) for name in names]
    requests.insert(1, request("large", "x" * 100))
    expected = ["new", "invalid_request", "invalid_request", "same", "new", "new"]
    assert sent(client, requests) == ([*expected, "queue_full"], 1)
    assert waiting(client) == ["taken", "same", "a", "b", "c"]
    bytes_of = [int(client.redis.hget(job_key(one), "chatjobs_bytes")) for one in waiting(client)]  # type: ignore[arg-type]
    assert int(client.redis.hget(keys.OPEN_BYTES, LINE)) == sum(bytes_of)  # type: ignore[arg-type]
    assert not client.redis.exists(job_key("large"), job_key("d"))


def test_a_key_of_another_program_prevents_its_job_alone(client: Client) -> None:
    client.redis.set(job_key("damaged"), "x")
    with pytest.raises(JobError, match=f"the key {job_key('damaged')} in Redis is a string"):
        enqueue(client.redis, [request(name) for name in ("a", "damaged", "b")])
    assert waiting(client) == ["a", "b"]


def cut_once(listener: socket.socket, server: str, after: int) -> None:
    """Stand between a client and the server at a path. When the client has sent `after` bytes, the
    next reply is lost, with the connection; its next connection stays."""
    is_cut = False
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        sent, lost = 0, False
        with client, socket.socket(socket.AF_UNIX) as redis:
            redis.connect(server)
            while not lost:
                for ready in select.select([client, redis], [], [])[0]:
                    data = ready.recv(2**16)
                    lost = lost or not data or (ready is redis and sent > after and not is_cut)
                    if not lost:
                        (client if ready is redis else redis).sendall(data)
                        sent += len(data) if ready is client else 0
        is_cut = is_cut or sent > after


def test_jobs_whose_replies_were_lost_are_there_once(
    client: Client, redis_url: str, tmp_path: Path
) -> None:
    names = [f"job-{number}" for number in range(300)]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "between"))
        listener.listen()
        server = redis_url.removeprefix("unix://")
        Thread(target=cut_once, args=(listener, server, 50_000), daemon=True).start()
        with Client(f"unix://{tmp_path / 'between'}") as other:
            found = enqueue(other.redis, [request(name) for name in names])
        listener.shutdown(socket.SHUT_RDWR)
    assert [one.id for one in found if isinstance(one, Enqueued)] == names
    assert {one.existed_before for one in found if isinstance(one, Enqueued)} >= {True}
    assert waiting(client) == names
    bytes_of = [int(client.redis.hget(job_key(one), "chatjobs_bytes")) for one in names]  # type: ignore[arg-type]
    assert int(client.redis.hget(keys.OPEN_BYTES, LINE)) == sum(bytes_of)  # type: ignore[arg-type]


def test_a_row_of_one_job_is_taken_for_the_next_of_its_script(client: Client) -> None:
    rows = [request(None, text, run="r", row=row) for text, row in (("a", 7), ("b", 7), ("c", 8))]
    found = enqueue(client.redis, rows)
    assert [isinstance(one, Enqueued) for one in found] == [True, False, True]
    with pytest.raises(JobError, match="row 7 of run 'r' is taken by another request"):
        raise found[1]  # type: ignore[misc]


def test_jobs_of_several_queues_and_tenants_keep_their_order(client: Client) -> None:
    requests = [
        request(f"{priority}-{tenant}-{number}", priority=priority, tenant=tenant)
        for number in range(3)
        for priority in ("bulk", "interactive")
        for tenant in ("t", None)
    ]
    ends, _ = sent(client, requests)
    assert set(ends) == {"new"}
    for priority, queue in (("bulk", keys.bulk_queue), ("interactive", keys.chat_queue)):
        name = queue("demo")
        assert waiting(client, queue_key(name)) == [f"{priority}-None-{n}" for n in range(3)]
        assert waiting(client, keys.tenant_queue(name, "t")) == [
            f"{priority}-t-{n}" for n in range(3)
        ]


def test_a_job_that_chose_its_id_keeps_its_row(client: Client) -> None:
    def request(text: str, **job: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return {"model": "m", "messages": messages, "job": {"run": "r", "row": 0, **job}}

    job = client.submit(request("a", id="mine"))
    for text in ("a", "b"):
        with pytest.raises(JobError, match="row 0 of run 'r' is taken"):
            client.submit(request(text))
    assert client.submit(request("a", id="mine")).id == job.id
    client.redis.delete(f"rq:job:{job.id}")  # by another program
    assert client.submit(request("b")).id != job.id
