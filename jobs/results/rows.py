"""From outbox entries to rows of `jobs.results.schema`: pure, and total.

A request that came from somewhere else may hold any JSON; what doesn't fit its column becomes null,
so that no entry can stop the recorder.
"""

from __future__ import annotations

import hashlib
import json
import math
from datetime import UTC, datetime
from typing import Any

from jobs.errors import JobError
from jobs.results.outbox import DEFAULT_RUN, OutboxEntry, row_index_of
from jobs.results.schema import SCHEMA_VERSION

Row = dict[str, Any]

# What an answer doesn't depend on.
_NOT_HASHED = frozenset({"job", "user", "metadata", "stream", "stream_options"})

_SAMPLING_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_SAMPLING_EXTRA = (
    "logit_bias",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "top_logprobs",
)
_PROVENANCE = {
    "model_revision": "revision",
    "model_fingerprint": "fingerprint",
    "tokenizer_hash": "tokenizer_hash",
    "chat_template_hash": "template_hash",
    "dtype": "dtype",
    "engine": "engine",
    "engine_version": "engine_version",
    "torch_version": "torch_version",
    "cuda_version": "cuda_version",
    "device_name": "device_name",
}


def rows_of(entry: OutboxEntry) -> list[Row]:
    """One row per choice; exactly one, with choice_index 0, unless the status is ok."""
    shared = _shared(entry)
    choices = _objects(_object(entry.get("completion")).get("choices"))
    if entry.get("status") != "ok" or not choices:
        choices = choices[:1] or [{}]
    return [
        {**shared, **_answer(entry, choice, number, len(choices))}
        for number, choice in enumerate(choices)
    ]


def request_hash(request: dict[str, Any]) -> str:
    """SHA-256 of the fields that an answer depends on; the same for any order of the fields."""
    content = {key: value for key, value in request.items() if key not in _NOT_HASHED}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _shared(entry: OutboxEntry) -> Row:
    """The columns that all choices of a job have in common."""
    request = _object(entry.get("request"))
    options = _object(request.get("job"))
    error = _object(entry.get("error"))
    job_id = _text(entry.get("job_id")) or ""
    row_index = _integer(entry.get("row_index"), 64)
    metadata = request.get("metadata")
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": _text(entry.get("run")) or DEFAULT_RUN,
        "job_id": job_id,
        "row_index": row_index_of(job_id, request) if row_index is None else row_index,
        "attempt": _integer(entry.get("attempt"), 16) or 0,
        "request_hash": request_hash(request),
        "operation": "chat",
        "status": _text(entry.get("status")) or "error",
        "model": _text(request.get("model")) or "",
        "custom_id": _text(options.get("custom_id")),
        "messages": _messages(request.get("messages")),
        "prompt_token_ids": _integers(entry.get("prompt_token_ids")),
        "tools": _json(request.get("tools")),
        "response_format": _json(request.get("response_format")),
        "target": _text(options.get("target")),
        "metadata": _json(metadata),
        "error_type": _text(error.get("code")),
        "error_message": _text(error.get("message")),
        "error_retryable": JobError.from_dict(error).retryable if error else None,
        "worker_id": _text(entry.get("worker")),
        "host": _text(entry.get("host")),
        **_times(entry),
        **_sampling(entry, request),
        **_provenance(entry),
    }


def _answer(entry: OutboxEntry, choice: dict[str, Any], number: int, total: int) -> Row:
    """The columns of one choice."""
    message = _object(choice.get("message"))
    usage = _object(_object(entry.get("completion")).get("usage"))
    status = entry.get("status")
    reason = _text(choice.get("finish_reason"))
    ids = _integers(_at(entry.get("output_token_ids"), number))
    tokens = _objects(_object(choice.get("logprobs")).get("content"))
    logprobs = _floats(_at(entry.get("token_logprobs"), number))
    if logprobs is None and tokens:
        logprobs = [_number(token.get("logprob")) for token in tokens]
    scored = [value for value in logprobs or () if value is not None]
    made = len(ids) if ids is not None else None
    if made is None and total == 1:
        made = _integer(usage.get("completion_tokens"), 32)
    text = _text(message.get("content"))
    details = _object(usage.get("completion_tokens_details"))
    first, last = _number(entry.get("first_token_at")), _number(entry.get("finished_at"))
    rest = (made or 0) - 1
    return {
        "choice_index": number,
        "text": text,
        "reasoning": _text(message.get("reasoning_content")),
        "tool_calls": _tool_calls(message.get("tool_calls")),
        "parsed": _parsed(_object(entry.get("request")).get("response_format"), text),
        "finish_reason": reason if status == "ok" else _text(status),
        "output_token_ids": ids,
        "logprob_sum": math.fsum(scored) if scored else None,
        "scored_tokens": len(scored) if scored else None,
        "token_logprobs": logprobs,
        "top_logprobs": _top_logprobs(tokens),
        "input_tokens": _integer(usage.get("prompt_tokens"), 32)
        or _length(entry.get("prompt_token_ids")),
        "output_tokens": made,
        "cached_tokens": _integer(
            _object(usage.get("prompt_tokens_details")).get("cached_tokens"), 32
        ),
        "reasoning_tokens": _integer(details.get("reasoning_tokens"), 32) if total == 1 else None,
        "tpot_s": (last - first) / rest if first and last and rest > 0 else None,
    }


def _times(entry: OutboxEntry) -> Row:
    queued, started = _number(entry.get("enqueued_at")), _number(entry.get("started_at"))
    first, last = _number(entry.get("first_token_at")), _number(entry.get("finished_at"))
    return {
        "enqueued_at": _moment(queued),
        "started_at": _moment(started),
        "first_token_at": _moment(first),
        "finished_at": _moment(last),
        "queue_s": _between(queued, started),
        "ttft_s": _between(started, first),
        "duration_s": _between(started, last),
    }


def _sampling(entry: OutboxEntry, request: dict[str, Any]) -> Row:
    """What was used; of a job that never ran, what was asked for."""
    used = {**request, **{k: v for k, v in _object(entry.get("sampling")).items() if v is not None}}
    limit = used.get("max_tokens")
    stop = used.get("stop")
    extra = {name: used[name] for name in _SAMPLING_EXTRA if used.get(name) is not None}
    seed = entry.get("seed")
    return {
        "seed": _integer(used.get("seed") if seed is None else seed, 64),
        **{name: _number(used.get(name)) for name in _SAMPLING_FLOATS},
        "top_k": _integer(used.get("top_k"), 32),
        "max_tokens": _integer(used.get("max_completion_tokens") if limit is None else limit, 32),
        "n": _integer(used.get("n"), 16),
        "stop": [stop] if isinstance(stop, str) else _texts(stop),
        "sampling_extra": _json(extra or None),
    }


def _provenance(entry: OutboxEntry) -> Row:
    model = _object(entry.get("provenance"))
    return {column: _text(model.get(name)) for column, name in _PROVENANCE.items()}


def _messages(value: Any) -> list[Row] | None:
    if not isinstance(value, list):
        return None
    return [
        {
            "role": _text(message.get("role")),
            "content": _content(message.get("content")),
            "reasoning_content": _text(message.get("reasoning_content")),
            "name": _text(message.get("name")),
            "tool_call_id": _text(message.get("tool_call_id")),
            "tool_calls": _tool_calls(message.get("tool_calls")),
        }
        for message in _objects(value)
    ]


def _content(value: Any) -> str | None:
    if isinstance(value, list):
        return "".join(_text(part.get("text")) or "" for part in _objects(value))
    return _text(value)


def _tool_calls(value: Any) -> list[Row] | None:
    if not isinstance(value, list):
        return None
    return [
        {
            "id": _text(call.get("id")),
            "type": _text(call.get("type")),
            "function": {
                "name": _text(_object(call.get("function")).get("name")),
                "arguments": _text(_object(call.get("function")).get("arguments")),
            },
        }
        for call in _objects(value)
    ]


def _top_logprobs(tokens: list[dict[str, Any]]) -> list[list[Row]] | None:
    """None where they were not asked for. OpenAI's form has no token ids."""
    if not any(token.get("top_logprobs") for token in tokens):
        return None
    return [
        [
            {"token": _text(top.get("token")), "logprob": _number(top.get("logprob"))}
            for top in _objects(token.get("top_logprobs"))
        ]
        for token in tokens
    ]


def _parsed(response_format: Any, text: str | None) -> str | None:
    kind = _object(response_format).get("type")
    if kind not in ("json_object", "json_schema") or text is None:
        return None
    try:
        json.loads(text)
    except ValueError:
        return None
    return text


# --- values that fit their columns ----------------------------------------------------------------


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _at(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list) and index < len(value) else None


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, list) and value else None


def _text(value: Any) -> str | None:
    """Half a surrogate pair, which no file can hold, becomes a question mark."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def _texts(value: Any) -> list[str] | None:
    if not isinstance(value, list):
        return None
    return [item for item in map(_text, value) if item is not None]


def _integer(value: Any, bits: int) -> int | None:
    """Out of the column's range: the nearest value in it."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    limit: int = 2 ** (bits - 1)
    return max(-limit, min(limit - 1, value))


def _integers(value: Any) -> list[int | None] | None:
    return [_integer(item, 32) for item in value] if isinstance(value, list) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _floats(value: Any) -> list[float | None] | None:
    return [_number(item) for item in value] if isinstance(value, list) else None


def _json(value: Any) -> str | None:
    return None if value is None else _text(json.dumps(value, ensure_ascii=False))


def _moment(seconds: float | None) -> datetime | None:
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
