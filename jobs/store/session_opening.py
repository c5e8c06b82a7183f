"""Opening, creating and forking sessions."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from redis.exceptions import OutOfMemoryError

from jobs import keys
from jobs.api.conversation import Turn
from jobs.api.request import ChatRequest
from jobs.api.session_fields import OWN_FIELDS, check_session_fields
from jobs.api.wire import describe
from jobs.errors import JobError, invalid
from jobs.keys import SESSION_ID
from jobs.store.session_scripts import CREATE, CreateSessionArgs, CreateSessionKeys
from jobs.store.session_steps import SessionState, contents, read_turns, run_command
from jobs.store.steps import Steps
from jobs.store.turns import foreign_field, other_model, refused, stored_text

SESSION_SECONDS = 7 * 86_400  # after its last change, a session expires


def open_session(
    name: str | None,
    model: str | None,
    system: str | None,
    ttl: int | None,
    options: dict[str, Any],
) -> Steps[SessionState]:
    """The session of this id; if it does not exist and `model` is given, a new one.

    Raises JobError, also if the session exists with other values than those that are given."""
    name = checked_id(name)
    if ttl is not None and (
        isinstance(ttl, bool) or not isinstance(ttl, int) or not 1 <= ttl < 2**31
    ):
        raise invalid(
            f"a session is kept for a whole number of seconds, at least 1; got {ttl!r}", "ttl"
        )
    checked = _checked_options("any" if model is None else model, system, options)
    wanted = SessionState(name, model or "", system or "", checked, ttl or SESSION_SECONDS)
    state = yield from _create(wanted)
    if model is not None and state.model != model:
        raise other_model(name, state.model, model)
    if system is not None and system != state.system:
        raise invalid(
            f"session {name!r} has another system message: open it without system, or change it "
            "with session.reset(system=...)",
            "system",
        )
    if ttl is not None and ttl != state.ttl:
        raise invalid(
            f"session {name!r} was created with ttl={state.ttl}, not {ttl}: open it without ttl",
            "ttl",
        )
    for field, value in checked.items():
        if value != state.options.get(field):
            raise _other_field(state, field, value)
    return state


def fork_session(state: SessionState, name: str | None, model: str | None) -> Steps[SessionState]:
    """A new session with the turns of another one, its fields and its time to live. Raises
    JobError, also if the id is taken."""
    name = checked_id(name)
    model = state.model if model is None else model
    _checked_options(model, None, {})
    system, turns = yield from read_turns(state.id)
    new = SessionState(name, model, system, state.options, state.ttl)
    return (yield from _create(new, turns, secrets.token_hex(8)))


def needed_model(name: str | None, model: str | None) -> str | None:
    """`model`, which a new session needs. Raises InvalidRequest."""
    if name is None and model is None:
        raise invalid(
            "model is required for a new session; with an id alone, an existing one is opened",
            "model",
        )
    return model


def checked_id(name: str | None) -> str:
    """An id of a session, a new one for None. Raises InvalidRequest."""
    if name is None:
        return secrets.token_hex(12)
    if not isinstance(name, str) or not SESSION_ID.fullmatch(name):
        raise invalid(
            "a session id has 1 to 200 letters, digits, '_', '-', '.', ':' and '@'; "
            f"got {str(name)[:60]!r}",
            "job.session",
        )
    return name


def _create(
    wanted: SessionState, turns: Sequence[Turn] = (), creation: str = ""
) -> Steps[SessionState]:
    """The session of this id as it is now; a new one if it has a model and the id is free.
    `creation`: token of a call that must create it."""
    names = CreateSessionKeys(keys.session(wanted.id), keys.turns(wanted.id), keys.LIMITS)
    args = CreateSessionArgs(
        wanted.id,
        wanted.model,
        wanted.system,
        json.dumps(wanted.options),
        wanted.ttl,
        creation,
        *contents(wanted.system, [turn.to_json() for turn in turns]),
    )
    try:
        reply = yield from run_command(wanted.id, "eval", CREATE, len(names), *names, *args)
    except OutOfMemoryError:  # one that exists can be opened
        fields = ("model", "system", "options", "ttl", "creation")
        *found, token = yield from run_command(wanted.id, "hmget", keys.session(wanted.id), fields)
        if found[0] is None:
            raise
        taken = creation and token != creation.encode()
        reply = [b"taken"] if taken else [b"open", *found]
    if reply[0] == b"taken":
        raise invalid(
            f"session {wanted.id!r} exists already: choose another id, or delete it first",
            "id",
        )
    if reply[0] != b"open":
        raise refused(wanted.id, wanted.model, reply)
    found = dict(zip(("model", "system", "options", "ttl"), reply[1:], strict=True))
    model, system, options, ttl = (
        stored_text(wanted.id, field, value) for field, value in found.items()
    )
    if not model:
        raise foreign_field(wanted.id, "model")
    seconds = SESSION_SECONDS
    if found["ttl"] is not None:
        seconds = int(ttl) if re.fullmatch("[0-9]{1,16}", ttl) else 0
        if not 1 <= seconds < 2**31:
            raise foreign_field(wanted.id, "ttl")
    return SessionState(wanted.id, model, system, _read_options(wanted.id, options), seconds)


def _other_field(state: SessionState, field: str, value: Any) -> JobError:
    """A session exists with another value of a field."""
    had = f"without {field}"
    if field in state.options:
        had = f"with {field}={describe(state.options[field])}, not {describe(value)}"
    return invalid(
        f"session {state.id!r} was created {had}: open it without {field}, or give it to one "
        f"turn, as session.send(..., {field}={describe(value)})",
        field,
    )


def _read_options(name: str, stored: str) -> dict[str, Any]:
    """The fields of a session's requests. Raises JobError."""
    try:
        options = json.loads(stored or "{}")
        if isinstance(options, dict):
            _checked_options("any", None, options)
            return options
    except JobError as error:
        raise foreign_field(name, "options", error.message) from None
    except (ValueError, RecursionError):
        pass
    raise foreign_field(name, "options")


def _checked_options(model: str, system: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a session's requests as JSON, checked together with its system text."""
    check_session_fields(options)
    messages = [{"role": "user", "content": "?"}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    dumped = ChatRequest(**options, model=model, messages=messages).to_dict()
    return {name: value for name, value in dumped.items() if name not in OWN_FIELDS}
