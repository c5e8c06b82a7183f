"""The columns of `jobs.results.schema` that all rows of a job share, from its outbox entry. Pure;
never raises for a JSON object.

Requests from other producers may hold any JSON. A value that doesn't fit its column becomes null,
so that no entry can stop the recorder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from jobs.api.chat_template import template_hash
from jobs.errors import JobError
from jobs.results.outbox import DEFAULT_RUN, OutboxEntry, operation_of, row_index_of
from jobs.results.values import (
    as_float,
    as_int,
    as_ints,
    as_json,
    as_object,
    as_objects,
    as_text,
    as_texts,
    as_time,
    seconds_between,
)

Row = dict[str, Any]

SCHEMA_VERSION = 1  # incremented when a column that has been written changes or is removed

# Fields of a request that don't affect its answer.
_NOT_HASHED = frozenset({"job", "user", "metadata", "stream", "stream_options", "cache_salt"})

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
    "bad_words",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "stop_token_ids",
    "min_tokens",
    "thinking_token_budget",
    "ignore_eos",
    "logprobs",
    "top_logprobs",
)
_PROVENANCE = {  # column: field of worker.backend.ModelInfo
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


def request_hash(request: dict[str, Any]) -> str:
    """SHA-256 of the fields that affect the answer, independent of their order."""
    content = {key: value for key, value in request.items() if key not in _NOT_HASHED}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def shared_columns(entry: OutboxEntry) -> Row:
    """The columns with the same value in all rows of a job."""
    request = as_object(entry.get("request"))
    options = as_object(request.get("job"))
    error = as_object(entry.get("error"))
    job_id = as_text(entry.get("job_id")) or ""
    row_index = as_int(entry.get("row_index"), 64)
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": as_text(entry.get("run")) or DEFAULT_RUN,
        "job_id": job_id,
        "row_index": row_index_of(job_id, request) if row_index is None else row_index,
        "repeat_index": as_int(entry.get("repeat_index"), 32) or 0,
        "attempt": as_int(entry.get("attempt"), 16) or 0,
        "request_hash": request_hash(request),
        "operation": operation_of(entry),
        "status": as_text(entry.get("status")) or "error",
        "model": as_text(request.get("model")) or "",
        "custom_id": as_text(options.get("custom_id")),
        "session": as_text(options.get("session")),
        "tenant": as_text(options.get("tenant")),
        "tags": as_texts(options.get("tags")),
        "messages": messages_of(request.get("messages")),
        "prompt_token_ids": as_ints(entry.get("prompt_token_ids")),
        "tools": as_json(request.get("tools")),
        "response_format": as_json(request.get("response_format")),
        "target": as_text(options.get("target")),
        "metadata": as_json(request.get("metadata")),
        "error_type": as_text(error.get("code")),
        "error_message": as_text(error.get("message")),
        "error_retryable": JobError.from_dict(error).retryable if error else None,
        "failures": [_failure(one) for one in as_objects(entry.get("failures"))],
        "worker_id": as_text(entry.get("worker")),
        "host": as_text(entry.get("host")),
        "peak_memory_mb": as_int(entry.get("peak_memory_mb"), 32),
        **_times(entry),
        **_sampling(entry, request),
        **_provenance(entry, request),
    }


def _provenance(entry: OutboxEntry, request: dict[str, Any]) -> Row:
    """The columns about the model that ran the job, with the hash of the template that it used."""
    columns = provenance_columns(as_object(entry.get("provenance")))
    own = as_text(request.get("chat_template"))
    if own is not None and entry.get("provenance"):
        columns["chat_template_hash"] = template_hash({"default": own})
    return columns


def _failure(failure: dict[str, Any]) -> Row:
    return {
        "attempt": as_int(failure.get("attempt"), 16),
        "at": as_time(failure.get("at")),
        **{name: as_text(failure.get(name)) for name in ("worker", "code", "message")},
    }


def _times(entry: OutboxEntry) -> Row:
    queued, started = as_float(entry.get("enqueued_at")), as_float(entry.get("started_at"))
    first, last = as_float(entry.get("first_token_at")), as_float(entry.get("finished_at"))
    return {
        "enqueued_at": as_time(queued),
        "started_at": as_time(started),
        "first_token_at": as_time(first),
        "finished_at": as_time(last),
        "queue_s": seconds_between(queued, started),
        "ttft_s": seconds_between(started, first),
        "duration_s": seconds_between(started, last),
    }


def _sampling(entry: OutboxEntry, request: dict[str, Any]) -> Row:
    """The parameters used, or those of the request if the job never ran."""
    used = {
        **request,
        **{k: v for k, v in as_object(entry.get("sampling")).items() if v is not None},
    }
    limit = used.get("max_tokens")
    stop = used.get("stop")
    extra = {name: used[name] for name in _SAMPLING_EXTRA if used.get(name) is not None}
    seed = entry.get("seed")
    return {
        "seed": as_int(used.get("seed") if seed is None else seed, 64),
        **{name: as_float(used.get(name)) for name in _SAMPLING_FLOATS},
        "top_k": as_int(used.get("top_k"), 32),
        "max_tokens": as_int(used.get("max_completion_tokens") if limit is None else limit, 32),
        "n": as_int(used.get("n"), 16),
        "stop": [stop] if isinstance(stop, str) else as_texts(stop),
        "sampling_extra": as_json(extra or None),
    }


def provenance_columns(model: Mapping[str, Any]) -> Row:
    """The columns about a model, null if they are empty. `model`: the fields of its
    worker.backend.ModelInfo."""
    return {column: as_text(model.get(name)) or None for column, name in _PROVENANCE.items()}


def messages_of(value: Any) -> list[Row] | None:
    """The column `messages` of a conversation; None if the value is none."""
    if not isinstance(value, list):
        return None
    return [
        {
            "role": as_text(message.get("role")),
            "content": content_of(message.get("content")),
            "reasoning_content": as_text(message.get("reasoning_content")),
            "name": as_text(message.get("name")),
            "tool_call_id": as_text(message.get("tool_call_id")),
            "tool_calls": tool_calls(message.get("tool_calls")),
        }
        for message in as_objects(value)
    ]


def content_of(value: Any) -> str | None:
    """The content of a message as one text."""
    if isinstance(value, list):
        return "".join(as_text(part.get("text")) or "" for part in as_objects(value))
    return as_text(value)


def tool_calls(value: Any) -> list[Row] | None:
    if not isinstance(value, list):
        return None
    return [
        {
            "id": as_text(call.get("id")),
            "type": as_text(call.get("type")),
            "function": {
                "name": as_text(as_object(call.get("function")).get("name")),
                "arguments": as_text(as_object(call.get("function")).get("arguments")),
            },
        }
        for call in as_objects(value)
    ]
