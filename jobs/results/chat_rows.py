"""The rows of chat jobs: one per choice. Pure; never raises for a JSON object."""

from __future__ import annotations

import json
import math
from typing import Any

from jobs.results.outbox import OutboxEntry
from jobs.results.rows import Row, content_of, shared_columns, tool_calls
from jobs.results.values import (
    as_float,
    as_floats,
    as_int,
    as_ints,
    as_object,
    as_objects,
    as_text,
    item_at,
    length_of,
)


def chat_rows(entry: OutboxEntry) -> list[Row]:
    """One row per choice; exactly one, with choice_index 0, unless the status is ok."""
    shared = {**shared_columns(entry), **_text_prompt(entry)}
    choices = as_objects(as_object(entry.get("completion")).get("choices"))
    if entry.get("status") != "ok" or not choices:
        choices = choices[:1] or [{}]
    return [
        {**shared, **_answer(entry, choice, number, len(choices))}
        for number, choice in enumerate(choices)
    ]


def _text_prompt(entry: OutboxEntry) -> Row:
    """The columns of a request without the chat template: its prompt is no conversation."""
    request = as_object(entry.get("request"))
    if request.get("apply_chat_template") is not False:
        return {}
    texts = [content_of(one.get("content")) or "" for one in as_objects(request.get("messages"))]
    return {"messages": None, "prompt": "".join(texts)}


def _answer(entry: OutboxEntry, choice: dict[str, Any], number: int, total: int) -> Row:
    """The columns of one choice."""
    message = as_object(choice.get("message"))
    usage = as_object(as_object(entry.get("completion")).get("usage"))
    status = entry.get("status")
    reason = as_text(choice.get("finish_reason"))
    ids = as_ints(item_at(entry.get("output_token_ids"), number))
    tokens = as_objects(as_object(choice.get("logprobs")).get("content"))
    logprobs = as_floats(item_at(entry.get("token_logprobs"), number))
    if logprobs is None and tokens:
        logprobs = [as_float(token.get("logprob")) for token in tokens]
    scored = [value for value in logprobs or () if value is not None]
    generated = len(ids) if ids is not None else None
    if generated is None and total == 1:
        generated = as_int(usage.get("completion_tokens"), 32)
    text = as_text(message.get("content"))
    details = as_object(item_at(entry.get("details"), number))
    if not details and total == 1:
        details = as_object(usage.get("completion_tokens_details"))
    first, last = as_float(entry.get("first_token_at")), as_float(entry.get("finished_at"))
    rest = (generated or 0) - 1
    return {
        "choice_index": number,
        "text": text,
        "reasoning": as_text(message.get("reasoning_content")),
        "tool_calls": tool_calls(message.get("tool_calls")),
        "parsed": _parsed(as_object(entry.get("request")).get("response_format"), text),
        "finish_reason": reason if status == "ok" else as_text(status),
        "output_token_ids": ids,
        "tokens": [as_text(token.get("token")) for token in tokens] if tokens else None,
        "logprob_sum": math.fsum(scored) if scored else None,
        "scored_tokens": len(scored) if scored else None,
        "token_logprobs": logprobs,
        "top_logprobs": _top_logprobs(tokens),
        "input_tokens": as_int(usage.get("prompt_tokens"), 32)
        or length_of(entry.get("prompt_token_ids")),
        "output_tokens": generated,
        "cached_tokens": as_int(
            as_object(usage.get("prompt_tokens_details")).get("cached_tokens"), 32
        ),
        "reasoning_tokens": as_int(details.get("reasoning_tokens"), 32),
        **_draft(details),
        "tpot_s": (last - first) / rest if first and last and rest > 0 else None,
    }


def _draft(details: dict[str, Any]) -> Row:
    """The figures of the draft, null if there was none."""
    accepted = as_int(details.get("accepted_prediction_tokens"), 32)
    rejected = as_int(details.get("rejected_prediction_tokens"), 32)
    return {
        "drafted_tokens": None if accepted is None or rejected is None else accepted + rejected,
        "accepted_tokens": accepted,
        "draft_steps": as_int(details.get("prediction_steps"), 32),
    }


def _top_logprobs(tokens: list[dict[str, Any]]) -> list[list[Row]] | None:
    """None unless requested. `token_id` stays null: OpenAI's form has no token ids."""
    if not any(token.get("top_logprobs") for token in tokens):
        return None
    return [
        [
            {"token": as_text(top.get("token")), "logprob": as_float(top.get("logprob"))}
            for top in as_objects(token.get("top_logprobs"))
        ]
        for token in tokens
    ]


def _parsed(response_format: Any, text: str | None) -> str | None:
    """The answer, if JSON was asked for and it is JSON: not if max_tokens has cut it."""
    kind = as_object(response_format).get("type")
    if kind not in ("json_object", "json_schema") or text is None:
        return None
    try:
        json.loads(text)
    except ValueError:
        return None
    return text
