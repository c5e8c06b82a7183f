"""The chat template that a request brings in place of the model's, and the hash of templates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from jobs.errors import InvalidRequest, invalid
from jobs.sizes import counted

FIELD = "chat_template"  # of a request
MAX_CHARACTERS = 2**16


def checked_template(text: str) -> str:
    """A template that may be one. Raises ValueError."""
    if not text.strip():
        raise ValueError("it is empty: give a Jinja template, or leave it out")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"it has {counted(len(text), 'character')} and at most {MAX_CHARACTERS} are taken: "
            "give a shorter one"
        )
    return text


def not_taken(model: str) -> InvalidRequest:
    """The error of a request with a template, for a model whose workers do not all take one: any of
    them may get the job."""
    return invalid(
        f"{FIELD}: the model {model} takes no template of a request here: put it into the model's "
        "folder, or start all workers of the model with --trust-request-chat-template",
        FIELD,
    )


def template_hash(sources: Mapping[str, str]) -> str:
    """The hash of templates by their names, as rows have it."""
    return hashlib.sha256(json.dumps(sorted(sources.items())).encode()).hexdigest()[:32]
