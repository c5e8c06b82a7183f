"""`job` of a request: how it is queued, and what is recorded with its result."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StrictBool, StrictInt

from jobs.api.wire import Number, Text, Wire, describe
from jobs.keys import JOB_ID, RUN_ID, SESSION_ID


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


class TurnOptions(Wire):
    """How a request joins its session."""

    wait: StrictBool = False  # run after the turns that have not ended, instead of being refused
    edit: StrictBool = False  # replace the last turn


class JobOptions(Wire):
    """How the request is queued, and what is recorded with its result. All optional."""

    id: Annotated[Text, AfterValidator(_job_id)] | None = None
    run: Annotated[Text, AfterValidator(_run_id)] | None = None
    row: Annotated[StrictInt, Field(ge=0)] | None = None  # row_index in the run
    custom_id: Text | None = None  # the user's own key, copied to the result row
    target: Text | None = None  # the expected answer, copied to the result row
    session: Annotated[Text, AfterValidator(_session_id)] | None = (
        None  # messages are its next turn
    )
    turn: TurnOptions | None = None
    priority: Literal["interactive", "bulk"] = "interactive"
    ttl: Annotated[Number, Field(gt=0)] | None = None  # seconds from enqueueing to the end
    retries: Annotated[StrictInt, Field(ge=0, le=100)] = 0  # for retryable errors
    # Seconds that Redis keeps the result; None: of the client, or a day, an hour for bulk jobs.
    result_ttl: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    tags: list[Text] | None = None
