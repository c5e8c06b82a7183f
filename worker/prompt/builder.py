"""Builds prompts: messages → token ids, with the model's own chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from jobs.api.request import ChatRequest, Message
from jobs.errors import JobError, invalid
from worker.loading.tokenizer import Tokenizer
from worker.prompt.encoder import PromptEncoder
from worker.prompt.template import ChatTemplate

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True)
class Prompt:
    """A rendered request: its text and its token ids."""

    text: str
    token_ids: list[int]


class PromptBuilder:
    """Renders and tokenizes the requests of one model. Thread-safe."""

    def __init__(
        self, model: str, tokenizer: Tokenizer, template: ChatTemplate | None, context: int
    ) -> None:
        self._model, self._template = model, template
        self._encoder = PromptEncoder(tokenizer, context)

    def build(self, request: ChatRequest) -> Prompt:
        """Render and tokenize a request. Raises JobError if it can't be rendered, asks for an
        unsupported feature, or exceeds the context."""
        if self._template is None:
            raise JobError(
                "unsupported_model",
                f"model {self._model} has no chat template: use a chat (instruct) checkpoint, or "
                "put a chat_template.jinja into its folder",
            )
        _check_supported(request)
        variables = request.chat_template_kwargs or {}
        reserved = sorted(RESERVED & variables.keys())
        if reserved:
            raise invalid(
                f"chat_template_kwargs can't set {', '.join(reserved)}", "chat_template_kwargs"
            )
        tools = None
        if request.tools and request.tool_choice != "none":
            tools = [tool.to_dict() for tool in request.tools]
        parts = self._template.takes_parts
        messages = [_plain(message, parts) for message in request.messages]
        text = self._template.render(messages, tools, variables)
        # The template itself writes the BOS token if the model needs one.
        token_ids = self._encoder.encode(text)
        if not token_ids:
            raise invalid(
                "the prompt has no tokens: the chat template renders these messages as empty text",
                "messages",
            )
        return Prompt(text, token_ids)

    def close(self) -> None:
        """End the process that tokenizes long prompts."""
        self._encoder.close()


def _check_supported(request: ChatRequest) -> None:
    """Raise JobError for features that need constrained decoding."""
    form = request.response_format
    if form is not None and form.type != "text":
        raise invalid(
            f"response_format {form.type} is not supported: only text is", "response_format"
        )
    if request.tool_choice not in (None, "auto", "none"):
        raise invalid(
            f"tool_choice {request.tool_choice!r} is not supported: only auto and none are",
            "tool_choice",
        )


def _plain(message: Message, parts: bool) -> dict[str, Any]:
    """A message in the form that templates expect. `parts`: keep a list of content parts; otherwise
    their texts are joined."""
    plain = message.to_dict()
    if message.content is not None and not parts:  # an absent field stays absent, not null
        plain["content"] = message.text
    if message.reasoning_content is not None:
        plain["thinking"] = message.reasoning_content  # some templates use this name
    if plain["role"] == "developer":
        plain["role"] = "system"  # OpenAI's newer name for the same role
    for call in plain.get("tool_calls", []):
        # Templates serialize the arguments with tojson, so they need the object, not its JSON text.
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            continue
    return plain
