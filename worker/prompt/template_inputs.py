"""The inputs of a chat template: messages and variables of a request, in the form that templates
expect, and the place where a message that is continued ends.
"""

from __future__ import annotations

import json
from typing import Any

from jobs.api.message import Message
from jobs.api.request import ChatRequest
from jobs.errors import invalid
from worker.prompt.template import ChatTemplate

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
# As in transformers: templates that trim a message remove the space, which shows that they trim.
END_MARK = "END_OF_CONTINUED_MESSAGE "


def messages_for(template: ChatTemplate, request: ChatRequest) -> list[dict[str, Any]]:
    """The messages. If the last one is to be continued, END_MARK ends its text."""
    messages = [_plain(message, template) for message in request.messages]
    if request.continue_final_message:
        _mark_end(messages[-1])
    return messages


def variables_for(template: ChatTemplate, request: ChatRequest) -> dict[str, Any]:
    """The variables beside messages and tools. Raises JobError("invalid_request")."""
    variables = dict(request.chat_template_kwargs or {})
    reserved = sorted(RESERVED & variables.keys())
    if reserved:
        raise invalid(
            f"chat_template_kwargs can't set {', '.join(reserved)}", "chat_template_kwargs"
        )
    if request.documents is not None:
        if not template.mentions("documents"):
            raise invalid(
                "documents: the model's chat template has none: put them into the messages",
                "documents",
            )
        _set(variables, "documents", request.documents)
    if request.reasoning_effort is not None:
        _set(variables, "reasoning_effort", request.reasoning_effort)
    if request.enable_thinking is not None:
        _check_thinking(template, "enable_thinking", thinks=request.enable_thinking)
        _set(variables, "enable_thinking", request.enable_thinking)
    elif request.reasoning_effort == "none" and not template.mentions("reasoning_effort"):
        _check_thinking(template, "reasoning_effort", thinks=False)
        variables.setdefault("enable_thinking", False)
    return variables


def before_mark(text: str, request: ChatRequest) -> str:
    """The rendered text up to END_MARK. Raises JobError if the template left it out."""
    place = text.rfind(END_MARK.strip())
    if place < 0 or request.messages[-1].text.strip() not in text:
        raise invalid(
            "continue_final_message is not possible: the model's chat template changes the text "
            "of the last message",
            "continue_final_message",
        )
    trimmed = not text.startswith(END_MARK, place)
    return text[:place].rstrip() if trimmed else text[:place]


def _set(variables: dict[str, Any], name: str, value: Any) -> None:
    if variables.setdefault(name, value) != value:
        raise invalid(f"{name} and chat_template_kwargs.{name} differ: set only one", name)


def _check_thinking(template: ChatTemplate, field: str, *, thinks: bool) -> None:
    """Refuse to switch reasoning on or off if the template has no such switch."""
    if template.mentions("enable_thinking"):
        return
    if thinks:
        raise invalid(f"{field}: the model's chat template has no enable_thinking", field)
    if template.mentions("<think>"):
        raise invalid(
            f"{field}: the model always reasons, its chat template has no enable_thinking", field
        )


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, list) and content:
        content[-1]["text"] += END_MARK
    elif isinstance(content, str) and content.strip():
        message["content"] = content + END_MARK
    else:
        raise invalid(
            "continue_final_message: the last message has no text to continue",
            "continue_final_message",
        )


def _plain(message: Message, template: ChatTemplate) -> dict[str, Any]:
    """A message in the form that templates expect. Parts of the content are joined, unless the
    template handles them."""
    plain = message.to_dict()
    plain["role"] = _role(message.role, template)
    if message.content is None and (not message.tool_calls or template.calls_need_content):
        plain["content"] = ""
    elif message.content is not None and not template.takes_parts:
        plain["content"] = message.text  # an absent field stays absent, not null
    if message.reasoning_content is not None:
        plain["thinking"] = message.reasoning_content  # some templates use this name
    for call in plain.get("tool_calls", []):
        # Templates serialize the arguments with tojson, so they need the object, not its JSON text.
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            continue
    return plain


def _role(role: str, template: ChatTemplate) -> str:
    """The name that the template has for a role."""
    if role == "developer":
        return "system"  # OpenAI's newer name for the same role
    if role in ("function", "ipython") and (
        template.mentions("'tool'") or template.mentions('"tool"')
    ):
        return "tool"  # templates that know both names render both alike
    return role
