"""Rows as lines of the files that OpenAI's Batch API makes: one line per request, answers in the
output file, all else in the error file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count, groupby
from typing import Any, NamedTuple, get_args

import pyarrow.compute as pc

from jobs.api.answer import (
    AssistantMessage,
    ChatCompletion,
    Choice,
    FinishReason,
    Usage,
    completion_id,
)
from jobs.api.message import FunctionCall, ToolCall
from jobs.errors import JobError, invalid
from jobs.results.export.formats import Order
from jobs.results.export.ordered import ordered_tables
from jobs.results.files import Results

COLUMNS = (
    "row_index", "custom_id", "job_id", "operation", "status", "model", "text",
    "reasoning", "tool_calls", "finish_reason", "tokens", "token_logprobs", "top_logprobs",
    "prompt_token_ids", "output_token_ids",
    "input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "started_at",
    "finished_at", "enqueued_at", "error_type", "error_message",
)  # fmt: skip

# The status that an HTTP server answers with; what is not named is a fault of the server.
HTTP_STATUS = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "unsupported_model": 400,
    "model_not_found": 404,
    "not_found": 404,
    "session_busy": 409,
    "queue_full": 429,
    "model_not_loaded": 503,
    "out_of_memory": 503,
    "unavailable": 503,
}
SERVER_ERROR = 500
NO_LOGPROB = -9999.0  # as OpenAI writes that of a token which is very unlikely
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)

Row = dict[str, Any]


class Line(NamedTuple):
    """A line of one of the two files. row: of the data set. rows: of the results, for each choice
    of an answer."""

    is_answer: bool
    content: dict[str, Any]
    row: int
    rows: Sequence[Row] = ()


def batch_lines(results: Results, run: str, order: Order = "input") -> Iterator[Line]:
    """The lines of a run. Samples and choices of one request are the choices of one line.

    Raises InvalidRequest for a run that is not of chats, and if two requests have one custom_id.
    """
    made = check_run(results, run)
    for table in ordered_tables(results, run, COLUMNS, order):
        for index, rows in groupby(table.to_pylist(), key=lambda row: row["row_index"]):
            yield line_of([*rows], made.get(index))


def check_run(results: Results, run: str) -> dict[int, str]:
    """Raise InvalidRequest if a run can't be a batch file. Returns the ids that are made for rows
    of the data set: those without a custom_id, and those that never ran, since a row before them
    has the same one."""
    keys = ["row_index", "custom_id", "status", "attempt"]
    table = results.table(run, [*keys, "operation"])
    others = [one for one in pc.unique(table["operation"]).to_pylist() if one != "chat"]
    if others:
        raise invalid(
            f"run {run} has rows of the operation {others[0]}, and a batch file holds chat "
            "completions",
            "format",
        )
    rows = table.group_by(keys).aggregate([]).to_pylist()
    owners: dict[str, int] = {}  # rows of the data set by their custom_ids
    nameless: set[int] = set()
    for row in sorted(rows, key=lambda row: (_was_refused(row), row["row_index"])):
        index, name = row["row_index"], row["custom_id"]
        if name is None:
            nameless.add(index)
        elif owners.setdefault(name, index) == index:
            continue
        elif _was_refused(row):
            nameless.add(index)
        else:
            raise invalid(
                f"two rows of run {run} have the custom_id {name!r}, which a batch file may have "
                "once",
                "format",
            )
    made: dict[int, str] = {}
    for index in sorted(nameless):
        names = chain((f"row-{index}",), (f"row-{index}-{n}" for n in count(2)))
        made[index] = next(name for name in names if name not in owners)
        owners[made[index]] = index
    return made


def _was_refused(row: Row) -> bool:
    """True if no job was made for a request."""
    return bool(row["status"] == "error" and row["attempt"] == 0)


def line_of(rows: Sequence[Row], custom_id: str | None = None) -> Line:
    """The line of a request, of its rows: an answer if one of them is. `custom_id`: instead of that
    of the rows."""
    first = rows[0]
    answered = [row for row in rows if row["status"] == "ok"]
    response = error = None
    if answered:
        response = _response(answered[0], 200, _completion(answered))
    elif first["status"] == "cancelled" or first["error_type"] == "timeout":
        error = _not_run(first)
    else:
        failure = JobError.from_dict({"code": first["error_type"], "message": _message(first)})
        status = HTTP_STATUS.get(failure.code, SERVER_ERROR)
        response = _response(first, status, {"error": failure.to_dict()})
    content = {
        "id": f"batch_req_{first['job_id']}",
        "custom_id": custom_id or first["custom_id"],
        "response": response,
        "error": error,
    }
    return Line(bool(answered), content, first["row_index"], answered)


def _response(row: Row, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{row['job_id']}", "body": body}


def _not_run(row: Row) -> dict[str, Any]:
    """The error of a request without a response."""
    if row["status"] == "cancelled":
        code = "batch_cancelled"
    else:
        code = "batch_expired" if row["started_at"] is None else "request_timeout"
    return {"code": code, "message": _message(row)}


def _message(row: Row) -> str:
    return row["error_message"] or f"the request ended as {row['status']}"


def _completion(rows: Sequence[Row]) -> dict[str, Any]:
    first = rows[0]
    moment = first["finished_at"] or first["enqueued_at"]
    choices = [
        Choice(index=index, message=_answer(row), finish_reason=_finish_reason(row))
        for index, row in enumerate(rows)
    ]
    completion = ChatCompletion(
        id=completion_id(first["job_id"]),
        created=int(moment.timestamp()) if moment else 0,
        model=first["model"],
        choices=choices,
        usage=_usage(rows),
    ).to_dict()
    for choice, row in zip(completion["choices"], rows, strict=True):
        # Keys that OpenAI's files always have.
        choice["logprobs"] = _logprobs(row)
        choice["message"].setdefault("refusal", None)
    return completion


# Rows that other programs have made may lack what a completion must have.


def _finish_reason(row: Row) -> FinishReason:
    found: FinishReason | None = next(
        (one for one in FINISH_REASONS if one == row["finish_reason"]), None
    )
    return found or ("tool_calls" if row["tool_calls"] else "stop")


def _answer(row: Row) -> AssistantMessage:
    calls = [_call(call) for call in row["tool_calls"] or ()]
    return AssistantMessage(
        content=row["text"], reasoning_content=row["reasoning"], tool_calls=calls or None
    )


def _call(call: dict[str, Any]) -> ToolCall:
    function = call["function"] or {}
    named = FunctionCall(name=function.get("name") or "", arguments=function.get("arguments") or "")
    return ToolCall(id=call["id"] or "", function=named)


def _logprobs(row: Row) -> dict[str, Any] | None:
    """The log-probabilities of an answer. None unless the request asks for them; rows of older
    versions have no text of the tokens, and so none."""
    tokens, values = row["tokens"], row["token_logprobs"]
    if tokens is None or values is None or len(tokens) != len(values):
        return None
    tops = row["top_logprobs"] or [None] * len(tokens)
    content = [
        {
            **_token(text, value),
            "top_logprobs": [_token(one["token"], one["logprob"]) for one in top or ()],
        }
        for text, value, top in zip(tokens, values, tops, strict=False)
    ]
    return {"content": content, "refusal": None}


def _token(text: str | None, logprob: float | None) -> dict[str, Any]:
    """A token. Rows have no bytes of one that is a part of a character."""
    text = text or ""
    has_bytes = "\ufffd" not in text
    return {
        "token": text,
        "bytes": list(text.encode()) if has_bytes else None,
        "logprob": NO_LOGPROB if logprob is None else logprob,
    }


def _usage(rows: Sequence[Row]) -> Usage:
    """The tokens of all choices; a job's prompt counts once."""
    jobs = {row["job_id"]: row for row in rows}.values()
    prompt = sum(row["input_tokens"] or 0 for row in jobs)
    completion = sum(row["output_tokens"] or 0 for row in rows)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=Usage.PromptDetails(
            cached_tokens=sum(row["cached_tokens"] or 0 for row in jobs)
        ),
        completion_tokens_details=Usage.CompletionDetails(
            reasoning_tokens=sum(row["reasoning_tokens"] or 0 for row in rows)
        ),
    )
