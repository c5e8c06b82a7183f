"""Tokenizers are in Redis while their models are served."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jobs import keys
from jobs.store import tokenizers
from jobs.store.connection.connect import connect
from jobs.store.tokenizers import fingerprint_of
from tests.waiting import wait_until
from tests.worker.fake_backend import FakeBackend
from worker.backend import ModelInfo
from worker.model_spec import ModelSpec
from worker.queue import tokenizer_publisher
from worker.queue.served import Served
from worker.queue.tokenizer_publisher import TokenizerPublisher


class Tokenizing(FakeBackend):
    """`documents`: by model."""

    def __init__(self, **documents: bytes) -> None:
        super().__init__()
        self.documents = documents
        self.served = Served()

    def serve(self, name: str) -> ModelInfo:
        info = self.load(ModelSpec(reference=name))
        self.served.add(info, ["alias"])
        return info

    def prompt_document(self, model: str) -> bytes:
        return self.documents[model]


Start = Any


@pytest.fixture
def start(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(tokenizer_publisher, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(tokenizer_publisher, "RENEW_SECONDS", 0.01)
    started: list[tuple[Tokenizing, TokenizerPublisher]] = []

    def start(backend: Tokenizing) -> TokenizerPublisher:
        publisher = TokenizerPublisher(connect(redis_url), backend, backend.served)
        publisher.start()
        started.append((backend, publisher))
        return publisher

    yield start
    for backend, publisher in started:
        publisher.close()
        backend.close()


def test_a_tokenizer_is_there_while_its_model_is_served(start: Start, redis_url: str) -> None:
    redis: Any = connect(redis_url)
    backend = Tokenizing(m=b"first")
    info = backend.serve("m")
    publisher = start(backend)
    first, second = fingerprint_of(b"first"), fingerprint_of(b"second")
    wait_until(lambda: publisher.fingerprints() == {"m": first, "alias": first})

    redis.expire(keys.tokenizer(first), 5)
    wait_until(lambda: redis.ttl(keys.tokenizer(first)) > 5)
    redis.delete(keys.tokenizer(first))
    wait_until(lambda: redis.exists(keys.tokenizer(first)))

    backend.documents["m"] = b"second"
    backend.served.add(replace(info, tokenizer_hash="other"))  # loaded again from other files
    wait_until(lambda: publisher.fingerprints().get("m") == second)
    assert redis.exists(keys.tokenizer(second))


def test_one_that_is_too_large_is_said_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tokenizers, "MOST_BYTES", 10)
    backend = Tokenizing(large=b"0" * 11, small=b"1")
    with caplog.at_level(logging.WARNING):
        backend.serve("large")
        backend.serve("small")
        publisher = start(backend)
        wait_until(lambda: "small" in publisher.fingerprints())
        renewals = publisher._renew_at
        wait_until(lambda: publisher._renew_at > renewals + 0.1)
    assert "large" not in publisher.fingerprints()
    assert [one for one in caplog.messages if "large" in one] == [
        "the tokenizer of large is not published: it has 11 bytes, and at most 10 bytes are kept "
        "in Redis"
    ]


def test_a_full_redis_is_waited_out(
    start: Start, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    redis: Any = connect(redis_url)
    redis.config_set("maxmemory", "1")
    backend = Tokenizing(m=b"first")
    backend.serve("m")
    try:
        publisher = start(backend)
        wait_until(lambda: "the tokenizers of the models are not published" in caplog.text)
        assert publisher.fingerprints() == {}
    finally:
        redis.config_set("maxmemory", "0")
    wait_until(lambda: "m" in publisher.fingerprints())
    assert caplog.text.count("are not published") == 1
