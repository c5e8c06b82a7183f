"""A request for a response, as the request of a chat, and what the response says of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.api.request import ChatRequest
from jobs.api.unsupported_fields import IGNORED_FIELDS, REFUSED_FIELDS
from jobs.api.wire import describe
from jobs.errors import JobError, invalid
from jobs.gateway.options import about, take_flag
from jobs.gateway.responses.items import Conversation
from jobs.keys import JOB_ID
from jobs.store.expiry import RESPONSE_SECONDS
from jobs.store.responses import unreadable

PREFIX = "resp_"
LOGPROBS = "message.output_text.logprobs"  # of `include`: the one that has an effect

# Fields that a request may have, and that have no effect on a model of text.
IGNORED = (
    *("access_programs", "context_management", "image", "max_tool_calls", "stream_options"),
    *(name for name in IGNORED_FIELDS if name not in ("prompt_cache_key", "safety_identifier")),
)
# Fields of a chat that have another name here, or no meaning.
REFUSED = {
    "conversation": "use previous_response_id",
    "prompt": "send its text as instructions and input",
    "messages": "use input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "reasoning_effort": "use reasoning.effort",
    "truncate": "use truncation",
    "logprobs": f'use include: ["{LOGPROBS}"]',
    "n": "a response has one answer",
    "prompt_logprobs": "use /v1/completions",
    "return_token_ids": "use /v1/chat/completions",
    "prompt_token_ids": "use /v1/completions",
    "apply_chat_template": "use /v1/completions",
    "continue_final_message": "use /v1/chat/completions",
}
# Fields that are no ones of a chat.
OWN = {
    *("background", "include", "input", "instructions", "max_output_tokens"),
    *("previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "text"),
    "truncation",
}
KNOWN = OWN | (ChatRequest.model_fields.keys() - REFUSED.keys())
# The names here of the fields of a chat, in errors.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. `response`: the response before its job has started. `items`: its input. `chat`:
    the request of its job, without what its previous response holds."""

    job_id: str
    response: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    chat: Mapping[str, Any]

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Asked:
        """Raises InvalidRequest. The fields of a chat that have the same name are not checked."""
        rest = {name: value for name, value in body.items() if value is not None}
        for name, remedy in REFUSED.items():
            if name in rest:
                raise invalid(f"{name} is no field of a response: {remedy}", name)
        for name in IGNORED:
            rest.pop(name, None)
        for name in sorted(rest.keys() - KNOWN - REFUSED_FIELDS.keys()):
            raise invalid(
                f"unknown field {describe(name)}; known fields: {', '.join(sorted(KNOWN))}", name
            )
        stream = take_flag(rest, "stream")
        background = take_flag(rest, "background")
        kept = take_flag(rest, "store") if "store" in rest else True
        if background and not kept:
            raise invalid("background: a response that is not stored can't be read later", "store")
        options = _object(rest, "job")
        if options.get("session") is not None or options.get("turn") is not None:
            raise invalid("job.session: use previous_response_id", "job.session")
        job_id = options.get("id")
        if job_id is None:
            job_id = secrets.token_hex(16)
        elif not (isinstance(job_id, str) and JOB_ID.fullmatch(job_id)):
            fact = "must have 1 to 200 letters, digits, '_' and '-'"
            raise invalid(f"job.id: {fact}, got {describe(job_id)}", "job.id")
        if kept:
            options.setdefault("result_ttl", RESPONSE_SECONDS)
        conversation = Conversation.read(rest.pop("input", None), job_id)
        instructions = _optional(rest, "instructions", str, "a text")
        previous = _optional(rest, "previous_response_id", str, "a text")
        tools, tool_choice, echoed_choice = _tools(rest)
        form = _text_format(rest)
        effort, summary = _reasoning(rest)
        cache_key = _optional(rest, "prompt_cache_key", str, "a text")
        safety_identifier = _optional(rest, "safety_identifier", str, "a text")
        truncation = rest.pop("truncation", "disabled")
        if truncation not in ("auto", "disabled"):
            raise invalid(
                f"truncation: must be auto or disabled, got {describe(truncation)}", "truncation"
            )
        most = rest.pop("max_output_tokens", None)
        top = rest.get("top_logprobs")
        chat: dict[str, Any] = {
            **rest,
            "messages": [
                *([] if instructions is None else [{"role": "system", "content": instructions}]),
                *conversation.messages,
            ],
            "stream": stream,
            "job": {**options, "id": job_id},
        }
        set_if = {
            "store": None if kept else False,
            "max_tokens": most,
            "response_format": form if form["type"] != "text" else None,
            "reasoning_effort": effort,
            "truncate": "oldest" if truncation == "auto" else None,
            "logprobs": True if _includes_logprobs(rest) or top else None,
            "tools": [_chat_tool(tool) for tool in tools] or None,
            "tool_choice": tool_choice,
        }
        chat.pop("include", None)
        chat |= {name: value for name, value in set_if.items() if value is not None}
        response = {
            "id": PREFIX + job_id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "queued" if background else "in_progress",
            "background": background,
            "error": None,
            "incomplete_details": None,
            "instructions": instructions,
            "max_output_tokens": most,
            "max_tool_calls": None,
            "model": rest.get("model"),
            "output": [],
            "parallel_tool_calls": rest.get("parallel_tool_calls", True),
            "previous_response_id": previous,
            "prompt_cache_key": cache_key,
            "reasoning": {"effort": effort, "summary": summary},
            "safety_identifier": safety_identifier,
            "service_tier": "default",
            "store": kept,
            "temperature": rest.get("temperature", 1.0),
            "text": {"format": _flat_format(form)},
            "tool_choice": echoed_choice,
            "tools": tools,
            "top_logprobs": top or 0,
            "top_p": rest.get("top_p", 1.0),
            "presence_penalty": rest.get("presence_penalty", 0.0),
            "frequency_penalty": rest.get("frequency_penalty", 0.0),
            "truncation": truncation,
            "usage": None,
            "user": rest.get("user"),
            "metadata": rest.get("metadata", {}),
        }
        return cls(job_id, response, conversation.items, chat)

    @property
    def kept_seconds(self) -> int:
        """How long it is stored. An invalid time is refused with its job."""
        seconds = self.chat["job"]["result_ttl"]
        valid = type(seconds) is int and 1 <= seconds < 2**31
        return seconds if valid else RESPONSE_SECONDS

    @classmethod
    def stored(cls, job_id: str, content: Mapping[str, Any]) -> Asked:
        """The request of a stored response, without its chat. Raises JobError."""
        response, items = content.get("response"), content.get("items")
        if not isinstance(response, dict) or not isinstance(items, list):
            raise unreadable(job_id)
        if not {"id", "created_at", "background", "instructions", "store"} <= response.keys():
            raise unreadable(job_id)
        return cls(job_id, response, items, {})

    def content(self) -> dict[str, Any]:
        """What is stored of it."""
        return {"response": self.response, "items": self.items}

    def after(self, earlier: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The request of its job, which goes on from these messages."""
        messages = self.chat["messages"]
        first = 0 if self.response["instructions"] is None else 1
        return {**self.chat, "messages": [*messages[:first], *earlier, *messages[first:]]}


def renamed(error: JobError) -> JobError:
    """An error of a chat, with the names of fields that its response has."""
    if error.param is None:
        return error
    head = error.param.partition("[")[0].partition(".")[0]
    name = NAMES.get(head)
    if name is None:
        return about(error, error.param.replace(".function.", "."))  # of tools
    return about(error, name if head == "messages" else name + error.param[len(head) :])


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Remove a field that is an object. Raises InvalidRequest."""
    value = body.pop(name, None)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(f"{name}: expected an object, got {describe(value)}", name)
    return dict(value)


def _optional(body: dict[str, Any], name: str, kind: type, expected: str) -> Any:
    """Remove a field of this type. Raises InvalidRequest."""
    value = body.pop(name, None)
    if value is not None and not isinstance(value, kind):
        raise invalid(f"{name}: expected {expected}, got {describe(value)}", name)
    return value


def _includes_logprobs(body: Mapping[str, Any]) -> bool:
    include = body.get("include")
    if include is not None and not isinstance(include, list):
        raise invalid(f"include: expected a list, got {describe(include)}", "include")
    return LOGPROBS in (include or ())


def _text_format(body: dict[str, Any]) -> dict[str, Any]:
    """Remove `text`; returns its format as `response_format`. Raises InvalidRequest."""
    text = _object(body, "text")
    form = text.get("format")
    if form is None:
        return {"type": "text"}
    if not isinstance(form, dict):
        raise invalid(f"text.format: expected an object, got {describe(form)}", "text.format")
    if form.get("type") != "json_schema":
        return {"type": form.get("type")}
    schema = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}


def _flat_format(form: Mapping[str, Any]) -> dict[str, Any]:
    """A `response_format` in the form of `text.format`."""
    if "json_schema" not in form:
        return dict(form)
    filled = {"name": "response", "description": None, "strict": None, **form["json_schema"]}
    return {"type": "json_schema", **filled}


def _reasoning(body: dict[str, Any]) -> tuple[Any, Any]:
    """Remove `reasoning`; returns its effort, and the summary that is asked for."""
    options = _object(body, "reasoning")
    summary = options.get("summary")
    return options.get("effort"), summary if summary in ("auto", "concise", "detailed") else None


def _tools(body: dict[str, Any]) -> tuple[list[dict[str, Any]], Any, Any]:
    """Remove the tools and `tool_choice`. Returns the functions among the tools, the choice of a
    chat, and the one that the response has. Raises InvalidRequest."""
    given = body.pop("tools", None) or []
    choice = body.pop("tool_choice", None)
    if not isinstance(given, list):
        raise invalid(f"tools: expected a list, got {describe(given)}", "tools")
    tools = []
    for number, tool in enumerate(given):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise invalid(
                f"tools[{number}]: expected an object with a type, got {describe(tool)}",
                f"tools[{number}]",
            )
        if kind == "function":
            tools.append(_function(tool, f"tools[{number}]"))
    skipped = len(tools) < len(given)
    if not isinstance(choice, dict):
        if skipped and not tools:
            choice = None  # of tools that nobody runs
        return tools, choice, choice or "auto"
    kind = choice.get("type")
    if kind == "function":
        name = choice.get("name")
        return tools, {"type": "function", "function": {"name": name}}, choice
    if kind == "allowed_tools":
        return _allowed(tools, choice)
    return tools, None, "auto"


def _function(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str):
        hint = ": put its fields beside the type" if isinstance(tool.get("function"), dict) else ""
        raise invalid(f"field '{path}.name' is required{hint}", f"{path}.name")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", **{name: tool.get(name) for name in names}}


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool.items() if name != "type"}
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def _allowed(
    tools: list[dict[str, Any]], choice: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], Any, Any]:
    """The tools that a choice allows, and whether one must be called."""
    allowed, mode = choice.get("tools"), choice.get("mode", "auto")
    if not isinstance(allowed, list) or not all(isinstance(one, dict) for one in allowed):
        raise invalid("tool_choice.tools: expected a list of tools", "tool_choice.tools")
    if mode not in ("auto", "required"):
        raise invalid(
            f"tool_choice.mode: must be auto or required, got {describe(mode)}", "tool_choice.mode"
        )
    names = {one.get("name") for one in allowed if isinstance(one.get("name"), str)}
    kept = [tool for tool in tools if tool["name"] in names]
    return kept, mode if kept else None, {**choice, "mode": mode}


def job_of_response(id: str) -> str | None:
    """The id of the job in that of a response; None for what is no such id."""
    job_id = id.removeprefix(PREFIX)
    return job_id if id.startswith(PREFIX) and JOB_ID.fullmatch(job_id) else None
