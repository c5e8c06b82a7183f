"""Sessions in Redis: what `Session` and `AsyncSession` share."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from redis.exceptions import ResponseError

from jobs import keys
from jobs.api.conversation import Turn, TurnInput, checked_system, new_messages
from jobs.api.request import ChatRequest
from jobs.api.session_fields import check_turn_fields
from jobs.encoding import to_json
from jobs.errors import JobError, invalid
from jobs.store.damage import is_damage, typed_wrongly
from jobs.store.limits import DEFAULTS
from jobs.store.session_scripts import (
    CUT,
    REPLACE,
    CutSessionArgs,
    CutSessionKeys,
    ReplaceSessionArgs,
    ReplaceSessionKeys,
)
from jobs.store.steps import Steps, command, commands, retry
from jobs.store.turns import (
    no_session,
    nothing_to_edit,
    parse_turns,
    refused,
    stored_text,
)


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
    except ResponseError as error:
        if not is_damage(error):
            raise
        names = (keys.session(name), keys.turns(name), keys.open_turns(name))
        found = yield from retry(commands([("type", key) for key in names]))
        wrong = typed_wrongly(dict(zip(names, found, strict=True)))
        if not wrong:
            raise
        raise JobError("internal", f"session {name!r} can't be read: {wrong[0]}") from None


def contents(system: str, turns: Sequence[str]) -> tuple[int, int, int, int, str]:
    """The last arguments of the scripts that write a whole session."""
    message = len(to_json({"role": "system", "content": system})) if system else 0
    size = sum(len(turn.encode()) for turn in turns)
    listed = json.dumps(turns, ensure_ascii=False)
    return message, size, DEFAULTS.message_bytes, DEFAULTS.session_bytes, listed
