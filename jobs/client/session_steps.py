"""Sessions in Redis: what `Session` and `AsyncSession` share."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from redis.exceptions import OutOfMemoryError, ResponseError

from jobs import keys
from jobs.api.conversation import Turn, TurnInput, new_messages
from jobs.api.request import ChatRequest
from jobs.client.damage import is_damage, typed_wrongly
from jobs.client.limits import DEFAULTS
from jobs.client.session_scripts import (
    CREATE,
    CUT,
    REPLACE,
    CreateSessionArgs,
    CreateSessionKeys,
    CutSessionArgs,
    CutSessionKeys,
    ReplaceSessionArgs,
    ReplaceSessionKeys,
)
from jobs.client.steps import Steps, command, retry
from jobs.client.turns import (
    no_session,
    nothing_to_edit,
    other_model,
    parse_turns,
    refused,
)
from jobs.encoding import to_json
from jobs.errors import JobError, invalid
from jobs.keys import SESSION_ID

SESSION_SECONDS = 7 * 86_400  # after its last change, a session expires
OWN_FIELDS = ("model", "messages", "job", "n")  # of a request: a session sets them


class SessionState(NamedTuple):
    """A session as it was created, or found."""

    id: str
    model: str
    system: str
    options: dict[str, Any]  # fields of its requests


def open_session(
    name: str | None,
    model: str | None,
    system: str | None,
    ttl: int,
    options: dict[str, Any],
    turns: Sequence[Turn] = (),
) -> Steps[SessionState]:
    """The session of this id; if it does not exist and `model` is given, a new one.

    Raises JobError."""
    name = checked_id(name)
    if isinstance(ttl, bool) or not isinstance(ttl, int) or not 1 <= ttl < 2**31:
        raise invalid(f"ttl: a session is kept for a number of seconds, at least 1; got {ttl!r}")
    checked = _checked_options(model or "any", system, options)
    names = CreateSessionKeys(keys.session(name), keys.turns(name), keys.LIMITS)
    texts = [turn.to_json() for turn in turns]
    contents = _contents(system or "", texts)
    args = CreateSessionArgs(name, model or "", system or "", json.dumps(checked), ttl, *contents)
    try:
        reply = yield from _run(name, "eval", CREATE, len(names), *names, *args)
    except OutOfMemoryError:  # one that exists can be opened
        found = yield from _run(name, "hmget", keys.session(name), ("model", "system", "options"))
        if found[0] is None:
            raise
        reply = [b"open", *found]
    if reply[0] != b"open":
        raise refused(name, model, reply)
    its_model, its_system, stored = [
        (value or b"").decode("utf-8", "replace") for value in reply[1:]
    ]
    if model is not None and its_model != model:
        raise other_model(name, its_model, model)
    if system is not None and system != its_system:
        raise invalid(
            f"session {name!r} has another system message: open it without system, or change it "
            "with session.reset(system=...)",
            "system",
        )
    return SessionState(name, its_model, its_system, {**_read_options(name, stored), **checked})


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
    system, stored = yield from _read_stored(name)
    return system.decode("utf-8", "replace"), parse_turns(name, stored)


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
    names = ReplaceSessionKeys(
        keys.session(name), keys.turns(name), keys.open_turns(name), keys.LIMITS
    )
    texts = [turn.to_json() for turn in turns]
    contents = _contents(system or "", texts)
    args = ReplaceSessionArgs(name, int(system is not None), system or "", *contents)
    reply = yield from _run(name, "eval", REPLACE, len(names), *names, *args)
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
    _refuse_own({name: value for name, value in fields.items() if name != "job"})
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


def _read_stored(name: str) -> Steps[tuple[bytes, list[bytes]]]:
    """The system text and the turns as they are stored. Raises JobError."""
    exists, system, stored = yield from _run(
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
    reply = yield from _run(name, "eval", CUT, len(names), *names, *args)
    if reply[0] not in (b"done", b"again"):
        raise refused(name, None, reply)
    outcome: bytes = reply[0]
    return outcome


def _run(name: str, *words: Any) -> Steps[Any]:
    """The reply to a command about a session. Raises JobError, with the key, if another program has
    written one of its keys."""
    try:
        return (yield from retry(command(*words)))
    except ResponseError as error:
        if not is_damage(error):
            raise
        names = (keys.session(name), keys.turns(name), keys.open_turns(name))
        found = yield from retry(lambda one: one.run_many([("type", key) for key in names]))
        wrong = typed_wrongly(dict(zip(names, found, strict=True)))
        if not wrong:
            raise
        raise JobError("internal", f"session {name!r} can't be read: {wrong[0]}") from None


def _contents(system: str, turns: Sequence[str]) -> tuple[int, int, int, int, str]:
    """The last arguments of the scripts that write a whole session."""
    message = len(to_json({"role": "system", "content": system})) if system else 0
    size = sum(len(turn.encode()) for turn in turns)
    listed = json.dumps(turns, ensure_ascii=False)
    return message, size, DEFAULTS.message_bytes, DEFAULTS.session_bytes, listed


def _read_options(name: str, stored: str) -> dict[str, Any]:
    """The fields of a session's requests. Raises JobError."""
    try:
        options = json.loads(stored or "{}")
    except (ValueError, RecursionError):
        options = None
    if isinstance(options, dict):
        return options
    raise JobError(
        "internal",
        f"session {name!r} can't be read: the field options of {keys.session(name)} is no JSON "
        "object, because another program has written it; remove the field (HDEL)",
    )


def _checked_options(model: str, system: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a session's requests as JSON, checked together with its system text."""
    _refuse_own(options)
    messages = [{"role": "user", "content": "?"}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    dumped = ChatRequest(**options, model=model, messages=messages).to_dict()
    return {name: value for name, value in dumped.items() if name in options}


def _refuse_own(fields: dict[str, Any]) -> None:
    for name in OWN_FIELDS:
        if name in fields:
            raise invalid(f"{name}: a session sets it itself: remove it", name)
