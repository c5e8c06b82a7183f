"""/tokenize, /detokenize and /tokenizer_info of models that workers serve, without their files."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from redis import Redis

from jobs import keys
from jobs.errors import JobError
from jobs.gateway.served import models_of as models_in_redis
from jobs.store import tokenizers as store
from jobs.store.connection.protocol import Commands
from jobs.store.damage import Damage
from jobs.store.expiry import TOKENIZER_SECONDS
from jobs.store.worker_status import read_statuses
from jobs.testing import FakeWorker
from tests.jobs.gateway.conftest import Start
from tests.jobs.gateway.in_process import send
from tests.waiting import wait_until
from tests.worker.checkpoints import make_checkpoint
from tests.worker.gguf.converter import convert
from tests.worker.site import Site
from tests.worker.tokenizers import begin_with, make_tokenizer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
LONG = [{"role": "user", "content": "1 + 2 is 3, " * 20}]


def wait_for_tokenizer(site: Site, model: str) -> str:
    """The fingerprint of the tokenizer of a model, once its worker has published it."""

    def tokenizer() -> str | None:
        found = models_in_redis(read_statuses(site.redis)).get(model)
        return found and found.tokenizer

    wait_until(tokenizer)
    return str(tokenizer())


@pytest.fixture
def http(site: Site, start: Start, tmp_path: Path) -> Iterator[httpx2.Client]:
    """A gateway whose workers serve a folder as m, a GGUF file of it as g, and the demo model."""
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    file = convert(folder, tmp_path / "g" / "g.gguf")
    site.worker(real=True, lease_seconds=12, models=[str(folder), str(file), "demo"])
    names = ("m", "g", "demo")
    for name in names:
        wait_for_tokenizer(site, name)
    with start().http() as http:
        wait_until(lambda: {one["id"] for one in models_of(http)} >= set(names))
        yield http


def models_of(http: httpx2.Client) -> list[Any]:
    found: list[Any] = http.get("/v1/models").json()["data"]
    return found


def tokenized(http: httpx2.Client, **body: Any) -> Any:
    reply = http.post("/tokenize", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_counts_are_those_of_the_jobs(http: httpx2.Client) -> None:
    for model in ("m", "g", "demo"):
        tools = {} if model == "demo" else {"tools": [TOOL]}
        for fields in (
            {"messages": QUESTION},
            {"messages": [{"role": "system", "content": "Be brief."}, *LONG]},
            {"messages": QUESTION, **tools},
            {"messages": QUESTION, "add_special_tokens": True},
            {"messages": QUESTION, "add_generation_prompt": False},
        ):
            body = {"model": model, **fields}
            job = http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()
            counted = tokenized(http, **body)
            assert counted["count"] == len(counted["tokens"]) == job["usage"]["prompt_tokens"]
            assert counted["token_strs"] is None
        for prompt in ("What is 17 + 25?", "x " * 300):
            body = {"model": model, "prompt": prompt}
            job = http.post("/v1/completions", json={**body, "max_tokens": 1}).json()
            if "usage" in job:  # it fits into the context
                assert tokenized(http, **body)["count"] == job["usage"]["prompt_tokens"]
    limits = {one["id"]: one["max_model_len"] for one in models_of(http)}
    assert tokenized(http, model="m", prompt="x")["max_model_len"] == limits["m"]


def test_a_prompt_begins_with_special_tokens_unless_told_otherwise(
    site: Site, start: Start, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "b", num_hidden_layers=1)
    tokenizer = make_tokenizer("qwen")
    tokenizer.post_processor = begin_with(tokenizer, "<|endoftext|>")
    tokenizer.save(str(folder / "tokenizer.json"))
    site.worker(real=True, lease_seconds=12, models=[str(folder)])
    wait_for_tokenizer(site, "b")
    first, *rest = tokenizer.encode("What is 17 + 25?").ids
    assert first == tokenizer.token_to_id("<|endoftext|>")
    with start().http() as http:
        for fields, expected in (
            ({}, [first, *rest]),
            ({"add_special_tokens": None}, [first, *rest]),
            ({"add_special_tokens": True}, [first, *rest]),
            ({"add_special_tokens": False}, rest),
        ):
            body = {"model": "b", "prompt": "What is 17 + 25?", **fields}
            assert tokenized(http, **body)["tokens"] == expected
            job = http.post("/v1/completions", json={**body, "max_tokens": 1}).json()
            assert job["usage"]["prompt_tokens"] == len(expected)
        wrong = http.post("/tokenize", json={**body, "add_special_tokens": "no"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "add_special_tokens")


def test_a_prompt_of_any_length_is_counted(http: httpx2.Client) -> None:
    prompt = "What is 17 + 25? " * 2000  # longer than what is tokenized in the gateway's process
    counted = tokenized(http, model="m", prompt=prompt)
    assert counted["count"] > counted["max_model_len"]


def test_tokens_become_their_text_again(http: httpx2.Client) -> None:
    text = "What is 17 + 25? Ünïcödé 🙂"
    for model in ("m", "g"):
        found = tokenized(
            http, model=model, prompt=text, add_special_tokens=False, return_token_strs=True
        )
        assert len(found["token_strs"]) == found["count"] > 5
        body = {"model": model, "tokens": found["tokens"]}
        assert http.post("/detokenize", json=body).json() == {"prompt": text}
    chat = tokenized(http, model="m", messages=QUESTION)
    text = http.post("/detokenize", json={"model": "m", "tokens": chat["tokens"]}).json()["prompt"]
    assert QUESTION[0]["content"] in text and "<|im_start|>" in text


def test_the_tokenizer_of_a_model_is_described(http: httpx2.Client) -> None:
    about = http.get("/tokenizer_info", params={"model": "m"}).json()
    assert about["model"] == "m" and about["model_max_length"] == 512
    assert about["eos_token"] and "messages" in about["chat_template"]
    ids = tokenized(http, model="m", prompt=about["eos_token"], add_special_tokens=False)
    assert ids["count"] == 1 and ids["tokens"][0] < about["vocab_size"]


def test_prompts_of_token_ids_are_echoed_as_text(http: httpx2.Client) -> None:
    text = "What is 17 + 25?"
    ids = tokenized(http, model="m", prompt=text, add_special_tokens=False)["tokens"]
    body = {"model": "m", "prompt": ids, "echo": True, "max_tokens": 0}
    scored = http.post("/v1/completions", json={**body, "logprobs": 1}).json()["choices"][0]
    assert "".join(scored["logprobs"]["tokens"]) == scored["text"] == text
    assert scored["logprobs"]["text_offset"][1] == len(scored["logprobs"]["tokens"][0]) > 0
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
    stream = http.post("/v1/completions", json={**body, "max_tokens": 1, "stream": True}).text
    first = json.loads(stream.splitlines()[0].removeprefix("data: "))
    assert first["choices"][0]["text"].startswith(text)


def test_wrong_requests_are_refused_by_field(http: httpx2.Client) -> None:
    for path, body, status, param in (
        ("/tokenize", {"model": "m"}, 400, "prompt"),
        ("/tokenize", {"model": "m", "prompt": "a", "messages": QUESTION}, 400, "prompt"),
        ("/tokenize", {"model": "m", "prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"model": "m", "prompt": "\ud800"}, 400, "prompt"),
        ("/tokenize", {"model": "m", "prompt": "a", "tools": []}, 400, "tools"),
        ("/tokenize", {"model": "m", "messages": []}, 400, "messages"),
        ("/tokenize", {"model": "m", "messages": QUESTION, "job": {"id": "x"}}, 400, "job"),
        ("/tokenize", {"model": "m", "messages": QUESTION, "truncate": "oldest"}, 400, "truncate"),
        ("/tokenize", {"prompt": "a"}, 400, "model"),  # three are served
        ("/tokenize", {"model": "none", "prompt": "a"}, 404, "model"),
        ("/tokenize", {"model": ["m"], "prompt": "a"}, 404, "model"),
        ("/detokenize", {"model": "m", "tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"model": "m", "tokens": [True]}, 400, "tokens"),
        ("/detokenize", {"model": "m", "tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"model": "m", "tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"model": "m", "tokens": [1], "x": 1}, 400, "x"),
    ):
        kind = {"content-type": "application/json"}
        reply = http.post(path, content=json.dumps(body), headers=kind)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text


def test_a_template_of_a_request_is_left_to_jobs(http: httpx2.Client) -> None:
    """Only a worker that was told to renders it."""
    asked = {"model": "m", "messages": QUESTION, "chat_template": "{{ messages }}"}
    error = http.post("/tokenize", json=asked).json()["error"]
    assert error["message"] == "chat_template: only a job has it: remove the field"


def test_the_only_model_needs_no_name(site: Site, start: Start) -> None:
    """As lm-evaluation-harness asks."""
    site.worker(real=True, lease_seconds=12, models=["demo"])
    wait_for_tokenizer(site, "demo")
    with start().http() as http:
        counted = tokenized(http, prompt="1 + 1", add_special_tokens=False)
        body = {"tokens": counted["tokens"]}
        assert http.post("/detokenize", json=body).json()["prompt"].strip() == "1 + 1"
        assert http.get("/tokenizer_info").json()["model"] == "demo"


def test_a_value_that_no_worker_has_written_is_one_error(site: Site, start: Start) -> None:
    site.worker(real=True, lease_seconds=12, models=["demo"])
    key = keys.tokenizer(wait_for_tokenizer(site, "demo"))
    written = site.redis.get(key)
    with start().http() as http:
        for junk in (
            b"x",
            b"\xff" * 100,
            zlib.compress(b"{}\n{}"),
            zlib.compress(b"x"),
            written[:9],
        ):
            site.redis.set(key, junk)
            reply = http.post("/tokenize", json={"prompt": "1 + 1"})
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (500, "internal")
            assert key in error["message"] and "delete it" in error["message"]
        site.redis.delete(key)
        assert http.post("/tokenize", json={"prompt": "1"}).headers["retry-after"]
        site.redis.rpush(key, "x")
        assert "RENAME" in http.post("/tokenize", json={"prompt": "1"}).json()["error"]["message"]
        site.redis.delete(key)
        site.redis.set(key, written)
        assert tokenized(http, prompt="1 + 1")["count"]


def test_a_worker_without_a_tokenizer_is_named() -> None:
    reply = send(FakeWorker("x"), "POST", "/tokenize", json={"model": "any", "prompt": "x"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_model")


def test_a_document_is_written_once_and_expires(client: Any) -> None:
    redis: Redis = client.redis
    document = b"{}\n{}"
    name = store.fingerprint_of(document)
    assert not store.renew_tokenizer(redis, name)
    store.write_tokenizer(redis, name, document)
    redis.expire(keys.tokenizer(name), 1)
    store.write_tokenizer(redis, name, document)
    assert redis.ttl(keys.tokenizer(name)) <= 1
    assert store.renew_tokenizer(redis, name)
    assert 1 < int(redis.ttl(keys.tokenizer(name))) <= TOKENIZER_SECONDS
    assert Commands(redis).run_steps(store.tokenizer_as_steps(name)) == document


def test_documents_are_of_limited_size(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_BYTES", 1000)
    bomb = zlib.compress(b"0" * 100_000)
    client.redis.set(keys.tokenizer("f"), bomb)
    found = Commands(client.redis).run_steps(store.tokenizer_as_steps("f"))
    assert isinstance(found, Damage)
    with pytest.raises(JobError, match="at most"):
        store.write_tokenizer(client.redis, "g", b"0" * 1001)
    assert not client.redis.exists(keys.tokenizer("g"))
