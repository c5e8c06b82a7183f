"""Sessions in Redis: opening, reading, changing, forking and deleting them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from redis.exceptions import OutOfMemoryError

from jobs import keys, lua
from jobs.api.conversation import Turn, TurnInput, checked_system, new_messages
from jobs.api.request import ChatRequest
from jobs.api.session_fields import OWN_FIELDS, check_session_fields, check_turn_fields
from jobs.api.wire import describe
from jobs.encoding import to_json
from jobs.errors import JobError, invalid
from jobs.keys import SESSION_ID
from jobs.store.connection.protocol import Steps, command, read_damage, retry
from jobs.store.damage import Damaged
from jobs.store.expiry import SESSION_SECONDS
from jobs.store.limits import DEFAULTS
from jobs.store.preludes import QUEUE_LUA, TURNS_LUA
from jobs.store.turns import (
    foreign_field,
    no_session,
    nothing_to_edit,
    other_model,
    parse_turns,
    refused,
    stored_text,
)

CREATE = lua.load("jobs.store", "session_create", QUEUE_LUA, TURNS_LUA)
CUT = lua.load("jobs.store", "session_cut", QUEUE_LUA, TURNS_LUA)
REPLACE = lua.load("jobs.store", "session_replace", QUEUE_LUA, TURNS_LUA)


# KEYS and ARGV of the scripts, by name and in order.


class CreateSessionKeys(NamedTuple):
    session: str
    turns: str
    limits: str


class CreateSessionArgs(NamedTuple):
    name: str
    model: str
    system: str
    options: str
    ttl: int
    creation: str
    system_bytes: int
    turns_bytes: int
    max_message_bytes: int
    max_session_bytes: int
    new_turns: str


class CutSessionKeys(NamedTuple):
    session: str
    turns: str
    open: str


class CutSessionArgs(NamedTuple):
    name: str
    change: Literal["keep", "delete"]
    found: int
    kept: int
    token: str


class ReplaceSessionKeys(NamedTuple):
    session: str
    turns: str
    open: str
    limits: str


class ReplaceSessionArgs(NamedTuple):
    name: str
    set_system: int
    system: str
    system_bytes: int
    turns_bytes: int
    max_message_bytes: int
    max_session_bytes: int
    new_turns: str
    token: str


class SessionState(NamedTuple):
    """A session as it was created, or found."""

    id: str
    model: str
    system: str
    options: dict[str, Any]  # fields of its requests
    ttl: int


def read_turns(name: str) -> Steps[tuple[str, list[Turn]]]:
    """The system text and all turns. Raises JobError if the session does not exist."""
    system, stored = yield from _read_stored(name)
    return stored_text(name, "system", system), parse_turns(name, stored)


def undo_turn(name: str) -> Steps[Turn]:
    """Remove the last turn and return it. Raises JobError."""
    while True:
        _, stored = yield from _read_stored(name)
        if not stored:
            raise nothing_to_edit(name)
        (last,) = parse_turns(name, stored[-1:])
        reply = yield from _cut(name, found=len(stored), kept=len(stored) - 1)
        if reply == b"done":
            return last


def replace_turns(name: str, system: str | None, turns: Sequence[Turn]) -> Steps[None]:
    """Set all turns, and the system text unless it is None. Raises JobError."""
    if not turns and system is None:
        yield from _cut(name)
        return
    system = None if system is None else checked_system(system)
    names = ReplaceSessionKeys(
        keys.session(name), keys.turns(name), keys.open_turns(name), keys.LIMITS
    )
    texts = [turn.to_json() for turn in turns]
    written = contents(system or "", texts)
    args = ReplaceSessionArgs(
        name, int(system is not None), system or "", *written, secrets.token_hex(8)
    )
    reply = yield from run_command(name, "eval", REPLACE, len(names), *names, *args)
    if reply[0] != b"done":
        raise refused(name, None, reply)


def delete_session(name: str) -> Steps[None]:
    """Delete the session, if it exists. Raises JobError if one of its jobs has not ended."""
    try:
        yield from _cut(name, change="delete")
    except JobError as error:
        if error.code != "not_found":
            raise


def read_ttl(name: str) -> Steps[int]:
    """Seconds until the session expires, unless it is used. Raises JobError."""
    seconds: int = yield from retry(command("ttl", keys.session(name)))
    if seconds == -2:
        raise no_session(name)
    return seconds


def turn_request(
    state: SessionState, content: TurnInput, *, wait: bool, edit: bool, fields: dict[str, Any]
) -> ChatRequest:
    """The request of one turn. Raises InvalidRequest."""
    given = fields.pop("job", None) or {}
    if not isinstance(given, dict):
        raise invalid("job: a dict of job options is needed here", "job")
    check_turn_fields(fields)
    turn = {name: True for name, wanted in (("wait", wait), ("edit", edit)) if wanted}
    job: Any = {**given, "session": state.id, **({"turn": turn} if turn else {})}
    return ChatRequest(
        **{**state.options, **fields, "model": state.model},
        messages=new_messages(content),
        job=job,
    )


def _read_stored(name: str) -> Steps[tuple[bytes, list[bytes]]]:
    """The system text and the turns as they are stored. Raises JobError."""
    exists, system, stored = yield from run_command(
        name,
        "eval",
        "return {redis.call('EXISTS', KEYS[1]), redis.call('HGET', KEYS[1], 'system') or '', "
        "redis.call('LRANGE', KEYS[2], 0, -1)}",
        2,
        keys.session(name),
        keys.turns(name),
    )
    if not exists:
        raise no_session(name)
    return system, stored


def _cut(
    name: str, *, change: Literal["keep", "delete"] = "keep", found: int = -1, kept: int = 0
) -> Steps[bytes]:
    names = CutSessionKeys(keys.session(name), keys.turns(name), keys.open_turns(name))
    args = CutSessionArgs(name, change, found, kept, secrets.token_hex(8))
    reply = yield from run_command(name, "eval", CUT, len(names), *names, *args)
    if reply[0] not in (b"done", b"again"):
        raise refused(name, None, reply)
    outcome: bytes = reply[0]
    return outcome


def run_command(name: str, *words: Any) -> Steps[Any]:
    """The reply to a command about a session. Raises JobError, with the key, if another program has
    written one of its keys."""
    try:
        return (yield from retry(command(*words)))
    except Damaged as error:
        names = (keys.session(name), keys.turns(name), keys.open_turns(name))
        wrong = yield from read_damage(error, names)
        if not wrong:
            raise
        raise JobError("internal", f"session {name!r} can't be read: {wrong[0]}") from None


def contents(system: str, turns: Sequence[str]) -> tuple[int, int, int, int, str]:
    """The last arguments of the scripts that write a whole session."""
    message = len(to_json({"role": "system", "content": system})) if system else 0
    size = sum(len(turn.encode()) for turn in turns)
    listed = json.dumps(turns, ensure_ascii=False)
    return message, size, DEFAULTS.message_bytes, DEFAULTS.session_bytes, listed


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
