"""The tokenizers of the models that workers serve, for processes that have no model.

A document has all that makes token ids of requests; `worker/prompt/published.py` writes and reads
it. Workers keep it in Redis under its fingerprint while they serve the model. Owns the key.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import redis

from jobs import keys
from jobs.errors import invalid
from jobs.sizes import size_texts
from jobs.store.connection.protocol import Steps, command, retry
from jobs.store.damage import Damage, Damaged, wrong_type
from jobs.store.expiry import TOKENIZER_SECONDS

MOST_STORED = 16 * 2**20  # bytes in Redis
MOST_BYTES = 128 * 2**20  # of a document


def fingerprint_of(document: bytes) -> str:
    return hashlib.sha256(document).hexdigest()[:32]


def renew_tokenizer(client: redis.Redis, fingerprint: str) -> bool:
    """Keep a document for TOKENIZER_SECONDS more. False: Redis has none. Raises RedisError."""
    return bool(client.expire(keys.tokenizer(fingerprint), TOKENIZER_SECONDS))


def write_tokenizer(client: redis.Redis, fingerprint: str, document: bytes) -> None:
    """Write a document, unless another worker has. Raises InvalidRequest if it is too large, and
    RedisError."""
    stored = zlib.compress(document)
    for size, most in ((len(document), MOST_BYTES), (len(stored), MOST_STORED)):
        if size > most:
            has, limit = size_texts(size, most)
            raise invalid(f"it has {has}, and at most {limit} are kept in Redis")
    client.set(keys.tokenizer(fingerprint), stored, ex=TOKENIZER_SECONDS, nx=True)


def tokenizer_as_steps(
    fingerprint: str, deadline: float | None = None
) -> Steps[bytes | Damage | None]:
    """A document; None if Redis has none, Damage if no worker has written the value. Raises
    RedisError."""
    key = keys.tokenizer(fingerprint)
    try:
        stored: Any = yield from retry(command("getrange", key, 0, MOST_STORED), deadline)
    except Damaged:
        return wrong_type(key, (yield from retry(command("type", key), deadline)).decode())
    if not stored:
        return None
    document = _unpacked(stored)
    if document is not None and fingerprint_of(document) == fingerprint:
        return document
    return Damage(
        key,
        "does not hold the tokenizer of its fingerprint, because another program has written it",
        "delete it (DEL), and a worker writes it again",
    )


def _unpacked(stored: bytes) -> bytes | None:
    """A document from its compressed form, of limited size; None if it is none."""
    reader = zlib.decompressobj()
    try:
        document = reader.decompress(stored, MOST_BYTES)
    except zlib.error:
        return None
    return document if reader.eof else None
