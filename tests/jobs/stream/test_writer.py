"""StreamWriter against Redis: what it writes, publishes and refuses."""

from __future__ import annotations

import json

from jobs import keys
from jobs.api.answer import TokenLogprob
from jobs.store.expiry import LOG_SECONDS
from jobs.store.stream import CALL_ENTRIES
from jobs.stream.delta import Delta
from jobs.stream.entries import END_SEQ, Entry, end_id
from tests.waiting import PATIENCE

REQUEST = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def test_an_entry_is_in_the_log_and_on_the_channel(worker):
    pubsub = worker.redis.pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(keys.live("a"))
    pubsub.get_message(timeout=PATIENCE)
    delta = Delta(1, "x", "y", (TokenLogprob(token="x", logprob=-1),), "stop")
    token = {"token": "x", "logprob": -1.0, "top_logprobs": []}
    payload = {"p": [{"i": 1, "c": "x", "r": "y", "l": [token], "f": "stop"}]}
    assert worker.writer.write_many([Entry("a", 2, 1, (delta,))]) == [True]
    ((entry_id, fields),) = worker.redis.xrange(keys.log("a"))
    assert entry_id == b"2-1"
    assert json.loads(fields[b"d"]) == payload
    message = pubsub.get_message(timeout=PATIENCE)
    assert json.loads(message["data"]) == {"id": "2-1", "d": payload}
    assert 0 < worker.redis.ttl(keys.log("a")) <= LOG_SECONDS


def test_a_zombie_can_neither_write_nor_publish_after_a_later_attempt(worker):
    assert worker.write("a", 2, 1, "new")
    pubsub = worker.redis.pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(keys.live("a"))
    pubsub.get_message(timeout=PATIENCE)
    assert not worker.write("a", 1, 5, "old")
    assert pubsub.get_message(timeout=0.2) is None
    assert worker.redis.xlen(keys.log("a")) == 1


def test_nothing_can_be_written_after_the_end(client, worker):
    job = client.submit(REQUEST)
    worker.start(job.id)
    worker.write(job.id, 1, 1, "all")
    worker.finish(job.id, "all")
    assert not worker.write(job.id, 1, 2, "more")
    assert [chunk.text for chunk in job.stream()] == ["all", ""]


def test_the_end_entry_is_the_last_one_of_its_attempt(client, worker):
    job = client.submit(REQUEST)
    worker.start(job.id)
    assert worker.write(job.id, 1, 2**48, "after years of one token per millisecond")
    worker.finish(job.id, "all")
    assert worker.redis.xinfo_stream(keys.log(job.id))["last-generated-id"] == end_id(1).encode()
    assert not worker.write(job.id, 1, 2**48 + 1, "more")
    assert not worker.write(job.id, 1, END_SEQ - 1, "more")
    assert worker.write(job.id, 2, 1, "of a later attempt")


def test_the_end_seq_is_exact_in_a_double():
    assert float(END_SEQ - 1) < float(END_SEQ) < float(END_SEQ + 1)
    assert int(float(END_SEQ)) == END_SEQ


def test_an_entry_that_is_sent_again_is_written_once(worker):
    assert worker.write("a", 1, 1, "x")
    assert worker.write("a", 1, 1, "x")
    assert not worker.write("a", 1, 1, "y")
    assert worker.redis.xlen(keys.log("a")) == 1


def test_entries_of_many_jobs_go_out_together_and_fail_separately(worker):
    worker.write("b", 2, 1, "x")
    entries = [Entry(job, 1, 1, (Delta(0, "x"),)) for job in "abc"]
    assert worker.writer.write_many(entries) == [True, False, True]
    assert worker.writer.write_many([]) == []


def test_a_log_that_another_program_has_written_keeps_no_other_entry_back(worker):
    worker.redis.set(keys.log("b"), "not a stream")
    entries = [Entry(job, 1, 1, (Delta(0, "x"),)) for job in "abc"]
    assert worker.writer.write_many(entries) == [True, False, True]


def test_more_entries_than_one_call_takes(worker):
    entries = [Entry(f"job-{n}", 1, 1, (Delta(0, "x"),)) for n in range(CALL_ENTRIES + 1)]
    assert worker.writer.write_many(entries) == [True] * len(entries)
    assert worker.redis.xlen(keys.log(f"job-{CALL_ENTRIES}")) == 1


def test_a_log_stays_within_its_bytes_and_keeps_its_end(client, worker, monkeypatch):
    """Redis drops whole blocks of entries (stream-node-max-entries), and not one by one."""
    monkeypatch.setattr("jobs.store.stream.LOG_BYTES", 100_000)
    job = client.submit(REQUEST)
    worker.start(job.id)
    lengths = []
    for seq in range(1, 401):
        assert worker.write(job.id, 1, seq, "x" * 970)  # 1,000 bytes with its JSON
        lengths.append(worker.redis.xlen(keys.log(job.id)))
    block = int(worker.redis.config_get("stream-node-max-entries")["stream-node-max-entries"])
    assert max(lengths) <= 100_000 / 1000 + block
    worker.finish(job.id, "x" * 388_000)
    ((last, _),) = worker.redis.xrevrange(keys.log(job.id), count=1)
    assert last == end_id(1).encode()
    assert "".join(chunk.text for chunk in job.stream()) == "x" * 388_000


def test_a_full_redis_takes_the_output_of_running_jobs(worker):
    worker.redis.config_set("maxmemory", "1")
    try:
        assert worker.write("a", 1, 1, "x")
    finally:
        worker.redis.config_set("maxmemory", "0")
