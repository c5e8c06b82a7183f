"""The fields of requests that a conversation takes: for all its turns, or for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.api.request import ChatRequest
from jobs.api.structured import FORMER_NAMES
from jobs.api.unsupported_fields import IGNORED_FIELDS, REFUSED_FIELDS
from jobs.api.wire import near_field
from jobs.errors import invalid

OWN_FIELDS = ("model", "messages", "job")  # of a request: a session sets them
TURN_FIELDS = ("request_id",)  # these differ from turn to turn


def check_session_fields(fields: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for a field that all turns of a session can't share."""
    for name in fields:
        if name in TURN_FIELDS:
            raise invalid(f"{name}: it is given with a turn, not with a session", name)
    check_turn_fields(fields)
    for name in fields:
        if (_near(name) or "").startswith("job."):
            raise invalid(
                f"unknown field {name!r}; it is given with a turn, as job={{{name!r}: ...}}", name
            )


def check_turn_fields(fields: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for a field that a session sets itself, and for an unknown one that is
    not like another: the error of ChatRequest has the fields that are like it."""
    for name in fields:
        if name in OWN_FIELDS:
            raise invalid(f"{name}: a session sets it itself: remove it", name)
        if name == "n" and fields[name] not in (None, 1):
            raise invalid("n: a turn of a conversation has one answer: remove it", name)
        if _is_unknown(name) and _near(name) in (None, *OWN_FIELDS):
            raise invalid(
                f"unknown field {name!r}; a session takes the fields of a request, such as "
                "temperature and tools: help(jobs.ChatRequest) lists them",
                name,
            )


def _near(name: str) -> str | None:
    return near_field(name, ChatRequest) if _is_unknown(name) else None


def _is_unknown(name: str) -> bool:
    known = (
        *(ChatRequest.model_fields, IGNORED_FIELDS, REFUSED_FIELDS, TURN_FIELDS),
        FORMER_NAMES,
    )
    return not any(name in names for names in known)
