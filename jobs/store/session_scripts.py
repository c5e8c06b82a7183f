"""The scripts that create, shorten, replace and delete sessions: KEYS and ARGV by name."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jobs import lua
from jobs.store.rq_format import TENANTS_LUA
from jobs.store.turns import TURNS_LUA

CREATE = lua.load("jobs.store", "session_create", TENANTS_LUA, TURNS_LUA)
CUT = lua.load("jobs.store", "session_cut", TENANTS_LUA, TURNS_LUA)
REPLACE = lua.load("jobs.store", "session_replace", TENANTS_LUA, TURNS_LUA)


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
