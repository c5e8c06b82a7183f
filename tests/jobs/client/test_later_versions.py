"""Readers ignore fields that a later version adds to what workers write; requests refuse them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from jobs import Client, JobError, ScoreRequest, keys
from jobs.api.answer import ChatCompletion
from jobs.api.chunk import ChatChunk
from jobs.api.score_result import ScoreResult
from jobs.operations import rows_of
from jobs.results.outbox import decode
from jobs.store.damage import Damage
from jobs.store.operator import Answer, OperatorCommand
from jobs.store.rq_layout import results_key
from jobs.store.worker_status import WORKER
from jobs.stream.entries import Entry
from jobs.testing import FakeWorker
from tests.jobs.conftest import STATUS
from tests.waiting import PATIENCE

LATER = {"later": {"version": 3}}
LOGPROB = {"token": "a", "logprob": -0.5}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "tool_calls": [CALL]},
            "finish_reason": "stop",
            "logprobs": {"content": [{**LOGPROB, "top_logprobs": [LOGPROB]}]},
        }
    ],
    "usage": {
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "total_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    },
}
CHUNK = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {"content": "hi", "tool_calls": [{**CALL, "index": 0}]}}],
}
SCORES = {
    "object": "score",
    "created": 1,
    "model": "m",
    "items": [
        {
            "type": "loglikelihood",
            "continuations": [
                {
                    "logprob_sum": -1.0,
                    "is_greedy": True,
                    "tokens": 1,
                    "bytes": 1,
                    "token_ids": [1],
                    "prompt_tokens": 1,
                }
            ],
        },
        {
            "type": "perplexity",
            "text": {"logprob_sum": -1.0, "tokens": 1, "words": 1, "bytes": 1, "windows": 1},
        },
    ],
}
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def later(value: Any) -> Any:
    """The value with a further field in each of its objects."""
    if isinstance(value, dict):
        return {**{name: later(one) for name, one in value.items()}, **LATER}
    return [later(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("kind", "content"),
    [(ChatCompletion, COMPLETION), (ChatChunk, CHUNK), (ScoreResult, SCORES)],
)
def test_further_fields_of_an_answer_are_ignored_at_each_level(kind: Any, content: Any) -> None:
    assert kind.model_validate(later(content)) == kind.model_validate(content)


def test_the_result_of_a_later_worker_is_read() -> None:
    with FakeWorker("hi") as worker:
        client = worker.client()
        job = client.submit({"model": "m", "messages": MESSAGES})
        before = job.result(timeout=PATIENCE)
        key = results_key(job.id)
        newest: Any = client.redis.xrevrange(key, count=1)
        fields = newest[0][1]
        content = json.loads(base64.b64decode(fields[b"return_value"]))
        text = base64.b64encode(json.dumps(later(content)).encode())
        client.redis.xadd(key, {**fields, b"return_value": text, b"later": b"1"})
        assert job.result(timeout=PATIENCE) == before


def test_entries_of_the_stream_and_the_outbox_of_a_later_worker_are_read() -> None:
    delta = {"i": 0, "c": "hi", "l": [LOGPROB], "t": [{**CALL, "index": 0}]}
    payload = {"p": [delta]}
    assert Entry.from_wire("j", "1-1", later(payload)) == Entry.from_wire("j", "1-1", payload)
    with FakeWorker("hi") as worker:
        client = worker.client()
        client.submit({"model": "m", "messages": MESSAGES}).result(timeout=PATIENCE)
        written: Any = client.redis.xrange(keys.outbox("default"))
        entry = decode(written[0][1][b"row"])
        further: Any = {**entry, **LATER}
        assert rows_of(further) == rows_of(entry)
        assert len(rows_of(entry)) == 1


def test_a_session_goes_on_after_an_answer_of_a_later_worker() -> None:
    with FakeWorker("hi") as worker:
        client = worker.client()
        session = client.session("s", model="m")
        session.send("a", timeout=PATIENCE)
        turn = json.loads(client.redis.lindex(keys.turns("s"), 0) or b"")
        before = session.history()
        turn["answer"] = later({**turn["answer"], "tool_calls": [CALL]})
        client.redis.lset(keys.turns("s"), 0, json.dumps({**turn, **LATER}))
        assert session.history() == [*before[:-1], {**before[-1], "tool_calls": [CALL]}]
        assert session.send("b", timeout=PATIENCE).text == "hi"


def test_the_status_of_a_later_worker_is_read() -> None:
    status: Any = {
        **STATUS,
        "results": {"path": "/r", "error": ""},
        "about": {"m": {"names": ["m"], "weight_bytes": 1}},
        "versions": {"m": {"model_fingerprint": "f"}},
    }
    further = {**status, **LATER, "memory": later(STATUS["memory"])}
    further |= {"results": later(status["results"]), "about": {"m": later(status["about"]["m"])}}
    further["versions"] = {"m": later(status["versions"]["m"])}
    assert WORKER.decode("k", json.dumps(further).encode()) == status


def test_a_damaged_status_is_named_with_its_field() -> None:
    about = {"m": {"names": ["m"], "weight_bytes": "x"}}
    damage = WORKER.decode("k", json.dumps({**STATUS, "about": about}).encode())
    assert isinstance(damage, Damage)
    assert "says about itself (the field about): delete it" in str(damage)


def test_a_folder_whose_name_is_no_text_damages_no_status() -> None:
    status: Any = {**STATUS, "results": {"path": "/r\udcff", "error": ""}}
    read = WORKER.decode("k", WORKER.encode(status))
    assert not isinstance(read, Damage) and read.get("results") == {"path": "/r?", "error": ""}


def test_commands_of_operators_and_their_answers_may_have_further_fields() -> None:
    command = {"command": "pause", "id": "c", "args": {}}
    assert OperatorCommand.read({**command, **LATER}) == OperatorCommand.read(command)
    answer = Answer({"a": 1}, final=True, error=JobError("timeout", "t"))
    read = Answer.decode(json.dumps(later(json.loads(answer.encode()))).encode())
    assert read is not None and str(read.error) == "timeout: t"


@pytest.mark.parametrize("level", ["request", "message", "call", "function"])
def test_requests_refuse_them(level: str, client: Client) -> None:
    call: Any = json.loads(json.dumps(CALL))
    message: Any = {"role": "assistant", "content": "hi", "tool_calls": [call]}
    request: Any = {"model": "m", "messages": [message]}
    place = {"request": request, "message": message, "call": call, "function": call["function"]}
    place[level].update(LATER)
    with pytest.raises(JobError, match=r"unknown field '.*later'"):
        client.submit(request)
    with pytest.raises(JobError, match="unknown field 'later'"):
        ScoreRequest.parse({"model": "m", "items": [], **LATER})
