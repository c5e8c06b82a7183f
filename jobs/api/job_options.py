"""`job` of a request: how it is queued, and what is recorded with its result."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)

from jobs.api.row_keys import MAX_ROW
from jobs.api.via import queues_of
from jobs.api.wire import Number, Text, Wire, describe
from jobs.keys import JOB_ID, RUN_ID, SESSION_ID

TENANT = re.compile(r"[!-~]{1,100}")  # it is a part of names in Redis
MAX_SECONDS = 10 * 365 * 86_400  # of delay and ttl
DEFAULT_RETRIES = 2  # attempts after a retryable error


def _job_id(name: str) -> str:
    if not JOB_ID.fullmatch(name):
        raise ValueError(f"must have 1 to 200 letters, digits, '_' and '-', got {describe(name)}")
    return name


def _run_id(name: str) -> str:
    if not RUN_ID.fullmatch(name):
        raise ValueError(
            "must have 1 to 100 letters, digits, '_', '-' and '.', and not begin with '.', "
            f"got {describe(name)}"
        )
    return name


def _session_id(name: str) -> str:
    if not SESSION_ID.fullmatch(name):
        raise ValueError(
            f"must have 1 to 200 letters, digits, '_', '-', '.', ':' and '@', got {describe(name)}"
        )
    return name


def _tenant(name: str) -> str:
    if not TENANT.fullmatch(name):
        raise ValueError(f"must have 1 to 100 ASCII characters and no space, got {describe(name)}")
    return name


def _seconds(value: Any) -> Any:
    return value.total_seconds() if isinstance(value, timedelta) else value


def _moment(value: Any) -> datetime:
    """A moment from its ISO 8601 text, or from Python's datetime, with a time zone."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(
                f"must be a time such as 2030-01-31T12:00:00Z, got {describe(value)}"
            ) from None
    if not isinstance(value, datetime):
        raise ValueError(f"must be a datetime, or its ISO 8601 text, got {describe(value)}")
    if value.utcoffset() is None:
        raise ValueError(
            f"{value.isoformat()} has no time zone: add one, such as Z or +01:00 "
            "(datetime.now().astimezone())"
        )
    return value


class TurnOptions(Wire):
    """Options of a request that is a turn of a session."""

    wait: StrictBool = False  # run after the turns that have not ended, instead of being refused
    edit: StrictBool = False  # replace the last turn


class JobOptions(Wire):
    """Options of the job: its queueing, and values that are recorded with its result. All
    optional."""

    id: Annotated[Text, AfterValidator(_job_id)] | None = None
    run: Annotated[Text, AfterValidator(_run_id)] | None = None
    row: Annotated[StrictInt, Field(ge=0, lt=MAX_ROW)] | None = None  # row_index in the run
    repeat: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None  # which sample of the row
    custom_id: Text | None = None  # the user's own key, copied to the result row
    target: Text | None = None  # the expected answer, copied to the result row
    session: Annotated[Text, AfterValidator(_session_id)] | None = (
        None  # messages are its next turn
    )
    turn: TurnOptions | None = None
    priority: Literal["interactive", "bulk"] = "interactive"
    tenant: Annotated[Text, AfterValidator(_tenant)] | None = None  # tenants take turns
    # The job waits this many seconds, or until this time, before it is queued:
    delay: Annotated[Number, BeforeValidator(_seconds), Field(ge=0, le=MAX_SECONDS)] | None = None
    at: Annotated[datetime, BeforeValidator(_moment)] | None = None
    # Seconds from when it is queued to the end:
    ttl: Annotated[Number, Field(gt=0, le=MAX_SECONDS)] | None = None
    retries: Annotated[StrictInt, Field(ge=0, le=100)] | None = None  # None: DEFAULT_RETRIES
    # Seconds that Redis keeps the result; None: of the client, or a day, an hour for bulk jobs.
    result_ttl: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    tags: list[Text] | None = None
    # The queues that the request has passed through; a gateway sets it.
    via: Annotated[list[Text], AfterValidator(queues_of)] | None = None

    @model_validator(mode="after")
    def _check_time(self) -> Self:
        if self.delay is not None and self.at is not None:
            raise ValueError("delay and at exclude each other: set only one")
        if self.session is not None and (self.delay is not None or self.at is not None):
            raise ValueError(
                f"{'at' if self.delay is None else 'delay'} can't be set for a turn of a session, "
                "which runs after the turn before it: leave it out, or send the request without a "
                "session"
            )
        return self
