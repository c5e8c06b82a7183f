"""An answer of a chat as the output of a response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.api.answer import ChatCompletion, Choice, TokenLogprob, TopLogprob, Usage
from jobs.api.message import ToolCall
from jobs.errors import ErrorCode, JobError
from jobs.gateway.failures import failed
from jobs.gateway.responses.asked import Asked

OF_REQUEST: tuple[ErrorCode, ...] = (
    "invalid_request",
    "context_length_exceeded",
    "unsupported_model",
)


def finished(asked: Asked, completion: ChatCompletion) -> dict[str, Any]:
    """The response with the answer of its job."""
    choice = completion.choices[0]
    cut = choice.finish_reason == "length"
    return {
        **asked.response,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output_of(asked.job_id, choice),
        "usage": None if completion.usage is None else _usage(completion.usage),
    }


def ended(asked: Asked, error: JobError) -> dict[str, Any]:
    """The response whose job has ended without an answer."""
    if error.code == "cancelled":
        return {**asked.response, "status": "cancelled"}
    shown = failed(error).error
    code = "invalid_prompt" if error.code in OF_REQUEST else "server_error"
    message = {"code": code, "message": shown["message"], "param": shown["param"]}
    return {**asked.response, "status": "failed", "error": {**message, "type": error.code}}


def output_of(job_id: str, choice: Choice) -> list[dict[str, Any]]:
    """The items of an answer: its reasoning, its text, and the functions that it calls."""
    message = choice.message
    calls = message.tool_calls or []
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    items = []
    if message.reasoning_content:
        last = not message.content and not calls
        items.append(
            reasoning_item(job_id, message.reasoning_content, status if last else "completed")
        )
    if message.content or not (items or calls):
        part = text_part(message.content or "", logprobs_of(choice))
        items.append(message_item(job_id, [part], "completed" if calls else status))
    return [*items, *(call_item(job_id, number, call) for number, call in enumerate(calls))]


def reasoning_item(job_id: str, text: str | None, status: str) -> dict[str, Any]:
    """Reasoning; with `text` None, before its part is added."""
    return {
        "id": f"rs_{job_id}",
        "type": "reasoning",
        "summary": [],
        "content": [] if text is None else [{"type": "reasoning_text", "text": text}],
        "status": status,
    }


def message_item(job_id: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {
        "id": f"msg_{job_id}",
        "type": "message",
        "role": "assistant",
        "content": content,
        "status": status,
    }


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def call_item(job_id: str, number: int, call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"fc_{job_id}_{number}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.function.name,
        "arguments": call.function.arguments,
        "status": "completed",
    }


def logprobs_of(choice: Choice) -> list[dict[str, Any]]:
    """Those of the text, if the request asks for them."""
    tokens = (choice.logprobs.content if choice.logprobs is not None else None) or []
    return [{**_logprob(one), "top_logprobs": _top(one)} for one in tokens]


def _top(token: TokenLogprob) -> list[dict[str, Any]]:
    return [_logprob(one) for one in token.top_logprobs]


def _logprob(token: TopLogprob) -> dict[str, Any]:
    return {"token": token.token, "bytes": token.bytes or [], "logprob": token.logprob}


def _usage(usage: Usage) -> Mapping[str, Any]:
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    cached = 0 if prompt is None else prompt.cached_tokens
    reasoning = 0 if completion is None else completion.reasoning_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.total_tokens,
    }
