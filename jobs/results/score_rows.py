"""The rows of scoring jobs: one per continuation, pick and text, each with the key of its item.
Pure; never raises for a JSON object.
"""

from __future__ import annotations

from typing import Any

from jobs.api.row_keys import given_row, item_rows
from jobs.errors import JobError
from jobs.results.outbox import OutboxEntry
from jobs.results.rows import Row, messages_of, request_hash, shared_columns
from jobs.results.values import (
    as_bool,
    as_float,
    as_floats,
    as_int,
    as_ints,
    as_json,
    as_object,
    as_objects,
    as_text,
    item_at,
)

# Fields of an item that don't affect its scores.
_NOT_HASHED = frozenset({"custom_id", "row", "repeat", "target", "metadata"})


def score_rows(entry: OutboxEntry) -> list[Row]:
    """The rows of all items. One that has no result has a single row, with its error or, if the job
    did not finish, with that of the job."""
    request, shared = as_object(entry.get("request")), shared_columns(entry)
    items = request.get("items")
    if not isinstance(items, list) or not items:
        return [{**shared, "choice_index": 0}]
    results = as_object(entry.get("completion")).get("items")
    common = {name: value for name, value in request.items() if name != "items"}
    first = given_row(request.get("job"))
    rows: list[Row] = []
    written: set[tuple[int, int]] = set()
    for number, key in enumerate(item_rows(shared["job_id"], first, items)):
        if key in written:  # the request is refused for that: each key has one row
            continue
        written.add(key)
        of_item = _of_item(as_object(items[number]), common, key)
        result = as_object(item_at(results, number))
        rows += ({**shared, **of_item, **row} for row in _of_result(items[number], result))
    return rows


def _of_item(item: dict[str, Any], common: dict[str, Any], key: tuple[int, int]) -> Row:
    """The columns that all rows of an item share."""
    content = {name: value for name, value in item.items() if name not in _NOT_HASHED}
    prompt = item.get("text" if item.get("type") == "perplexity" else "prompt")
    return {
        "row_index": key[0],
        "repeat_index": key[1],
        "request_hash": request_hash({**common, "item": content}),
        "operation": as_text(item.get("type")) or "score",
        "custom_id": as_text(item.get("custom_id")),
        "target": as_text(item.get("target")),
        "metadata": as_json(item.get("metadata")),
        "messages": messages_of(item.get("messages")),
        "prompt": as_text(prompt),
        "prompt_token_ids": as_ints(prompt),
    }


def _of_result(item: Any, result: dict[str, Any]) -> list[Row]:
    """The columns of the rows of one item."""
    error = as_object(result.get("error"))
    if error:
        return [{"choice_index": 0, **_failed(error)}]
    scores, text = as_objects(result.get("continuations")), as_object(result.get("text"))
    if text:
        return [{"choice_index": 0, **_SUCCEEDED, **_text(text)}]
    if not scores:  # the job has ended before the item was scored
        return [{"choice_index": 0}]
    given = as_object(item).get("continuations", as_object(item).get("choices"))
    texts = [as_text(item_at(given, number)) for number in range(len(scores))]
    picked = as_int(result.get("picked"), 16)
    if picked is None:
        return [
            {"choice_index": number, **_SUCCEEDED, **_continuation(text, score)}
            for number, (text, score) in enumerate(zip(texts, scores, strict=True))
        ]
    row = _continuation(item_at(texts, picked), as_object(item_at(scores, picked)))
    choices = [{"text": text, **_sums(score)} for text, score in zip(texts, scores, strict=True)]
    return [
        {
            "choice_index": 0,
            **_SUCCEEDED,
            **row,
            "text": row["continuation"],
            "picked_index": picked,
            "choices": choices,
        }
    ]


_SUCCEEDED: Row = {
    "status": "ok",
    "error_type": None,
    "error_message": None,
    "error_retryable": None,
}


def _failed(error: dict[str, Any]) -> Row:
    return {
        "status": "cancelled" if error.get("code") == "cancelled" else "error",
        "error_type": as_text(error.get("code")),
        "error_message": as_text(error.get("message")),
        "error_retryable": JobError.from_dict(error).retryable,
    }


def _sums(score: dict[str, Any]) -> Row:
    return {
        "logprob_sum": as_float(score.get("logprob_sum")),
        "is_greedy": as_bool(score.get("is_greedy")),
        "scored_tokens": as_int(score.get("tokens"), 32),
        "scored_bytes": as_int(score.get("bytes"), 32),
    }


def _continuation(text: str | None, score: dict[str, Any]) -> Row:
    return {
        **_sums(score),
        "continuation": text,
        "output_token_ids": as_ints(score.get("token_ids")),
        "token_logprobs": as_floats(score.get("token_logprobs")),
        "truncated_tokens": as_int(score.get("truncated_tokens"), 32),
        "input_tokens": as_int(score.get("prompt_tokens"), 32),
        "cached_tokens": as_int(score.get("cached_tokens"), 32),
    }


def _text(score: dict[str, Any]) -> Row:
    return {
        **_sums(score),
        "scored_words": as_int(score.get("words"), 32),
        "token_logprobs": as_floats(score.get("token_logprobs")),
        "input_tokens": as_int(score.get("tokens"), 32),
    }
