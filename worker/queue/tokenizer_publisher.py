"""Publishes the tokenizers of a worker's models, so that gateways need no model.

A thread of its own reads them from the backend and writes them to Redis, since those of large
vocabularies take a second. Owns which of them are there.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import NamedTuple

import redis

from jobs.errors import JobError
from jobs.store.tokenizers import fingerprint_of, renew_tokenizer, write_tokenizer
from worker.backend import ModelInfo, TokenizingBackend
from worker.queue.served import Served

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at the models
RENEW_SECONDS = 30.0  # between two renewals, and after a failure
THREAD_END_SECONDS = 2.0  # that the end of the thread is waited for


class _Published(NamedTuple):
    """A tokenizer. `fingerprint`: None if it is too large for Redis."""

    info: ModelInfo  # of the load that it belongs to
    fingerprint: str | None


class TokenizerPublisher:
    """The tokenizers of one worker, in Redis from the load of each model on, until no worker that
    serves it runs."""

    def __init__(self, client: redis.Redis, backend: TokenizingBackend, served: Served) -> None:
        self._redis, self._backend, self._served = client, backend, served
        # By the own names of the models; replaced, never changed: any thread may read it.
        self._published: dict[str, _Published] = {}
        self._renew_at = 0.0  # monotonic
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="tokenizers", daemon=True)

    def fingerprints(self) -> dict[str, str]:
        """Of the tokenizers that are in Redis, by each name of their models."""
        published = self._published
        found = {name: published[own] for name, own in self._served.items() if own in published}
        return {name: one.fingerprint for name, one in found.items() if one.fingerprint}

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(THREAD_END_SECONDS)
        self._redis.close()

    def _loop(self) -> None:
        pause, failing = 0.0, False
        while not self._closing.wait(pause):
            pause = LOOK_SECONDS
            try:
                self._look()
                failing = False
            except Exception as error:
                if not failing:
                    logger.warning("the tokenizers of the models are not published: %s", error)
                pause, failing = RENEW_SECONDS, True

    def _look(self) -> None:
        """Publish the tokenizers of the models that were loaded, and renew all that are due."""
        if time.monotonic() >= self._renew_at:
            for name, one in list(self._published.items()):
                if one.fingerprint and not renew_tokenizer(self._redis, one.fingerprint):
                    self._published = {k: v for k, v in self._published.items() if k != name}
            self._renew_at = time.monotonic() + RENEW_SECONDS
        for info in self._served.open_models:
            before = self._published.get(info.name)
            if before is not None and before.info == info:
                continue
            with suppress(JobError):  # unloaded meanwhile
                document = self._backend.prompt_document(info.name)
                fingerprint = self._publish(info.name, document)
                self._published = {**self._published, info.name: _Published(info, fingerprint)}

    def _publish(self, name: str, document: bytes) -> str | None:
        """The fingerprint of the tokenizer of a model, which is in Redis then; None if it is too
        large."""
        fingerprint = fingerprint_of(document)
        try:
            if not renew_tokenizer(self._redis, fingerprint):
                write_tokenizer(self._redis, fingerprint, document)
        except JobError as error:
            logger.warning("the tokenizer of %s is not published: %s", name, error.message)
            return None
        return fingerprint
