"""Byte-pair tokenizers from values in memory. Writing them as JSON for the library to parse takes
three to five times as long for a vocabulary of 150,000 tokens.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HubTokenizer
from tokenizers.models import BPE

PARTS = ("vocab", "merges")


def build(values: dict[str, Any]) -> HubTokenizer:
    """The library's tokenizer of a tokenizer.json with these values, whose model is a BPE and whose
    added tokens are in its vocabulary. Raises what the library raises."""
    model = values["model"]
    options = {name: value for name, value in model.items() if name not in ("type", *PARTS)}
    merges = [(left, right) for left, right in model["merges"]]
    inner = HubTokenizer.from_str(json.dumps(_without_vocabulary(values)))
    inner.model = BPE(model["vocab"], merges, **options)
    added = []
    for entry in values["added_tokens"]:
        flags = {name: flag for name, flag in entry.items() if name not in ("id", "content")}
        added.append(AddedToken(entry["content"], **flags))
    inner.add_tokens(added)
    return inner


def digest(values: dict[str, Any]) -> str:
    """SHA-256 of all values, in hex."""
    model = values["model"]
    vocabulary = model["vocab"]
    texts = (vocabulary, [part for pair in model["merges"] for part in pair])
    hashed = hashlib.sha256(json.dumps(_without_vocabulary(values)).encode())
    hashed.update(json.dumps([values["added_tokens"], *map(len, texts)]).encode())
    hashed.update(array("q", vocabulary.values()).tobytes())
    for parts in texts:
        hashed.update("\0".join(parts).encode())
    return hashed.hexdigest()


def _without_vocabulary(values: dict[str, Any]) -> dict[str, Any]:
    model = {**values["model"], "vocab": {}, "merges": []}
    return {**values, "added_tokens": [], "model": model}
