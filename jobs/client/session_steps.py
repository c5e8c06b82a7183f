"""Sessions in Redis: what `Session` and `AsyncSession` share."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from jobs import keys, lua
from jobs.api.conversation import Turn, TurnInput, new_messages
from jobs.api.request import ChatRequest
from jobs.api.session_fields import OWN_FIELDS, check_session_fields, check_turn_fields
from jobs.api.wire import describe
from jobs.client.rq_format import LINES_LUA
from jobs.client.steps import Steps, command, retry
from jobs.client.turns import TURNS_LUA, no_session, nothing_to_edit, other_model, refused
from jobs.errors import JobError, invalid
from jobs.keys import SESSION_ID

CREATE = lua.load("jobs.client", "session_create", LINES_LUA, TURNS_LUA)
CHANGE = lua.load("jobs.client", "session_change", LINES_LUA, TURNS_LUA)

SESSION_SECONDS = 7 * 86_400  # after its last change, a session expires


# The names of the `unpack` lines of the scripts, in the same order.


class CreateSessionKeys(NamedTuple):
    session: str
    turns: str


class CreateSessionArgs(NamedTuple):
    name: str
    model: str
    system: str
    options: str
    ttl: int
    creation: str


class ChangeSessionKeys(NamedTuple):
    session: str
    turns: str
    open: str


class ChangeSessionArgs(NamedTuple):
    name: str
    change: Literal["keep", "delete"]
    found: int
    kept: int
    set_system: int
    system: str


class SessionState(NamedTuple):
    """A session as it was created, or found."""

    id: str
    model: str
    system: str
    options: dict[str, Any]  # fields of its requests
    ttl: int


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
        raise invalid(f"ttl: a session is kept for a number of seconds, at least 1; got {ttl!r}")
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


def _create(
    wanted: SessionState, turns: Sequence[Turn] = (), creation: str = ""
) -> Steps[SessionState]:
    """The session of this id as it is now; a new one if it has a model and the id is free.
    `creation`: token of a call that must create it."""
    names = CreateSessionKeys(keys.session(wanted.id), keys.turns(wanted.id))
    args = CreateSessionArgs(
        wanted.id, wanted.model, wanted.system, json.dumps(wanted.options), wanted.ttl, creation
    )
    texts = [turn.to_json() for turn in turns]
    reply = yield from retry(command("eval", CREATE, len(names), *names, *args, *texts))
    if not reply:
        raise no_session(wanted.id)
    if reply == [b"taken"]:
        raise invalid(
            f"session {wanted.id!r} exists already: choose another id, or delete it first",
            "id",
        )
    model, system, options, ttl = [(value or b"").decode("utf-8", "replace") for value in reply]
    return SessionState(
        wanted.id, model, system, json.loads(options or "{}"), int(ttl or SESSION_SECONDS)
    )


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


def needed_model(name: str | None, model: str | None) -> str | None:
    """`model`, which a new session needs. Raises InvalidRequest."""
    if name is None and model is None:
        raise invalid(
            "model is required for a new session; with an id alone, an existing one is opened",
            "model",
        )
    return model


def read_turns(name: str) -> Steps[tuple[str, list[Turn]]]:
    """The system text and all turns. Raises JobError if the session does not exist."""
    call = command(
        "eval",
        "return {redis.call('EXISTS', KEYS[1]), redis.call('HGET', KEYS[1], 'system') or '', "
        "redis.call('LRANGE', KEYS[2], 0, -1)}",
        2,
        keys.session(name),
        keys.turns(name),
    )
    exists, system, stored = yield from retry(call)
    if not exists:
        raise no_session(name)
    return system.decode("utf-8", "replace"), [Turn.from_json(turn) for turn in stored]


def undo_turn(name: str) -> Steps[Turn]:
    """Remove the last turn and return it. Raises JobError."""
    while True:
        _, turns = yield from read_turns(name)
        if not turns:
            raise nothing_to_edit(name)
        reply = yield from _change(name, found=len(turns), kept=len(turns) - 1)
        if reply == b"done":
            return turns[-1]


def replace_turns(name: str, system: str | None, turns: Sequence[Turn]) -> Steps[None]:
    """Set all turns, and the system text unless it is None. Raises JobError."""
    yield from _change(name, system=system, turns=turns)


def delete_session(name: str) -> Steps[None]:
    """Delete the session, if it exists. Raises JobError if one of its jobs has not ended."""
    try:
        yield from _change(name, change="delete")
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
    job = {**given, "session": state.id, **({"turn": turn} if turn else {})}
    return ChatRequest(
        **{**state.options, **fields, "model": state.model},
        messages=new_messages(content),
        job=job,
    )


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


def _change(
    name: str,
    *,
    change: Literal["keep", "delete"] = "keep",
    found: int = -1,
    kept: int = 0,
    system: str | None = None,
    turns: Sequence[Turn] = (),
) -> Steps[bytes]:
    names = ChangeSessionKeys(keys.session(name), keys.turns(name), keys.open_turns(name))
    args = ChangeSessionArgs(name, change, found, kept, int(system is not None), system or "")
    texts = [turn.to_json() for turn in turns]
    reply = yield from retry(command("eval", CHANGE, len(names), *names, *args, *texts))
    if reply[0] not in (b"done", b"again"):
        raise refused(name, None, reply)
    outcome: bytes = reply[0]
    return outcome


def _checked_options(model: str, system: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a session's requests as JSON, checked together with its system text."""
    check_session_fields(options)
    messages = [{"role": "user", "content": "?"}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    dumped = ChatRequest(**options, model=model, messages=messages).to_dict()
    return {name: value for name, value in dumped.items() if name not in OWN_FIELDS}
