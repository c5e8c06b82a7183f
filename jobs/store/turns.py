"""The turns of sessions in Redis: the history that a job begins with, and why a session refuses it.

A session is a hash, a list of turns and a list of the jobs that have not ended (jobs/keys.py). A
job joins it in the script that enqueues it, and leaves it in the script that ends it, which appends
the turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jobs import keys, lua
from jobs.api.conversation import Turn, messages_of
from jobs.errors import JobError, SessionBusy, invalid
from jobs.sizes import size_texts
from jobs.store.preludes import QUEUE_LUA, TURNS_LUA

BEGIN = lua.load("jobs.store", "begin_turn", QUEUE_LUA, TURNS_LUA)
SESSION = "chatjobs_session"  # field of a job's hash: its session


# The content of each field of a session's hash, and the remedy if another program has written it.
_FIELDS = {
    "model": ("name of a model", "set it (HSET)"),
    "system": ("text", "remove it (HDEL), or reset the session with another system message"),
    "options": ("JSON object of a request's fields", "remove it (HDEL)"),
    "ttl": ("number of seconds from 1 to 2147483647", "set it (HSET) or remove it (HDEL)"),
}


# KEYS and ARGV of begin_turn.lua, by name and in order.


class BeginKeys(NamedTuple):
    job: str
    session: str
    turns: str
    open: str


class BeginArgs(NamedTuple):
    job_id: str
    name: str
    model: str
    edits: int


@dataclass(frozen=True, slots=True)
class History:
    """The state of a session when a job of it began. `replaces`: the job's turn takes the place of
    the last one, which `messages` leave out."""

    messages: list[dict[str, Any]]
    replaces: bool


def session_of(request: Mapping[str, Any]) -> str:
    """The session of a request in JSON; empty if it has none, or no valid one."""
    options = request.get("job")
    name = options.get("session") if isinstance(options, dict) else None
    return name if isinstance(name, str) and keys.SESSION_ID.fullmatch(name) else ""


def begin_script(job: str, job_key: str, request: Mapping[str, Any]) -> tuple[BeginKeys, BeginArgs]:
    """KEYS and ARGV of BEGIN for a job of a session."""
    name = session_of(request)
    names = BeginKeys(job_key, keys.session(name), keys.turns(name), keys.open_turns(name))
    return names, BeginArgs(job, name, str(request.get("model", "")), int(_edits(request)))


def _edits(request: Mapping[str, Any]) -> bool:
    """True if the turn of a request that has a session replaces the last turn."""
    options = request["job"].get("turn")
    return isinstance(options, dict) and bool(options.get("edit"))


def read_history(job: str, request: Mapping[str, Any], reply: Sequence[Any]) -> History:
    """The history in the reply of BEGIN. Raises JobError."""
    name = session_of(request)
    if reply[0] != b"begun":
        raise refused(name, request.get("model"), reply)
    _, system, stored, replaced = reply
    turns = parse_turns(name, stored)
    # An answer of a requeued job; not of an earlier job, with other messages, that had the id.
    answered = [turn.job == job and turn.messages == request.get("messages") for turn in turns]
    if any(answered[:-1]):
        raise invalid(
            f"job {job} has answered in session {name!r} already, and later turns follow: send its "
            "messages as a new turn",
            "job.session",
        )
    replaces = any(answered)
    if not replaces and _edits(request):
        if not turns:
            raise nothing_to_edit(name)
        if replaced != stored[-1]:
            raise invalid(
                f"job {job} was requeued to edit session {name!r}, and the last turn is not known "
                "to be the one that it replaces: send its messages as a new edit",
                "job.turn.edit",
            )
        replaces = True
    kept = turns[:-1] if replaces else turns
    return History(messages_of(stored_text(name, "system", system), kept), replaces)


def parse_turns(name: str, stored: Sequence[bytes]) -> list[Turn]:
    """The turns of a session. Raises JobError for one that no worker has written."""
    turns = []
    for turn in stored:
        try:
            turns.append(Turn.from_json(turn))
        except (ValueError, RecursionError) as error:
            raise JobError(
                "internal",
                f"session {name!r} can't be read: {keys.turns(name)} has an element that is no "
                f"turn ({error}), because another program has written it: remove it (LREM), or "
                "reset or delete the session",
            ) from None
    return turns


def refused(name: str, model: Any, reply: Sequence[Any]) -> JobError:
    """The error for a refusal of one of the scripts."""
    reason, *values = [value.decode("utf-8", "replace") for value in reply]
    match reason:
        case "session":
            return no_session(name)
        case "session_model":
            its_model = stored_text(name, "model", reply[1])
            return other_model(name, its_model, model)
        case "session_field":
            return foreign_field(name, values[0])
        case "busy":
            return SessionBusy(
                f"session {name!r} is busy: its job {values[0]} has not ended; wait for it, cancel "
                "it, or send with wait=True (job.turn.wait) to run after it",
                values[0],
            )
        case "session_open":
            return JobError(
                "session_busy",
                f"session {name!r} has {values[0]} jobs that have not ended, and the limit is "
                f"{values[1]}: send again when some have ended",
            )
        case _:
            used, limit = size_texts(*map(float, values))
            of_system = reason == "message_bytes"
            what = "in its system message" if of_system else "of turns"
            return invalid(
                f"session {name!r} has {used} {what}, and the limit ({reason}) is {limit}: "
                "shorten or undo them, reset it, or begin another one, or raise the limit "
                f"(chatjobs limits {reason}=N)",
                "job.session",
            )


def foreign_field(name: str, field: str, problem: str = "") -> JobError:
    """Another program has written a field of the session's hash. `problem`: what is wrong."""
    wanted, remedy = _FIELDS[field]
    details = f" ({problem})" if problem else ""
    return JobError(
        "internal",
        f"session {name!r} can't be read: the field {field} of {keys.session(name)} is no {wanted}"
        f"{details}, because another program has written it: {remedy}",
    )


def stored_text(name: str, field: str, value: bytes | None) -> str:
    """A field of the session's hash as text. Raises JobError."""
    try:
        return (value or b"").decode()
    except UnicodeDecodeError:
        raise foreign_field(name, field, "it is not in UTF-8") from None


def no_session(name: str) -> JobError:
    """No session has the name."""
    return JobError(
        "not_found",
        f"no session {name!r} in Redis: it was never created, was deleted, or has expired; "
        "client.session(id, model=...) creates it",
        "job.session",
    )


def other_model(name: str, its: str, model: Any) -> JobError:
    """The session belongs to another model."""
    return invalid(
        f"session {name!r} belongs to model {its[:200]!r}, not to {model!r}: continue it with that "
        "model, or fork its history into a session of the other model",
        "model",
    )


def nothing_to_edit(name: str) -> JobError:
    """The session has no turn."""
    return invalid(f"session {name!r} has no turn to edit or undo", "job.turn.edit")
