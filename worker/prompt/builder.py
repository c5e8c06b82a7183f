"""Messages → token ids, by the checkpoint's own chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from jobs.api.request import ChatRequest, Message
from jobs.errors import JobError, invalid
from worker.loading.tokenizer import Tokenizer
from worker.prompt.template import ChatTemplate

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True)
class Prompt:
    """A request, rendered: its text and its token ids."""

    text: str
    token_ids: list[int]


class PromptBuilder:
    """Renders and tokenizes the requests of one model. Thread-safe."""

    def __init__(
        self, model: str, tokenizer: Tokenizer, template: ChatTemplate | None, context: int
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._template, self._context = template, context

    def build(self, request: ChatRequest) -> Prompt:
        """Raises JobError for what can't be rendered, served or fitted into the context."""
        if self._template is None:
            raise JobError(
                "unsupported_model",
                f"model {self._model} has no chat template: use a chat (instruct) checkpoint, or "
                "put a chat_template.jinja into its folder",
            )
        _check_served(request)
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
        most = self._context * self._tokenizer.longest_token
        if len(text) > most:  # not worth the memory that tokenizing it takes
            raise JobError(
                "context_length_exceeded",
                f"the messages make {len(text)} characters and the context of {self._context} "
                f"tokens holds {most} at most: shorten the messages or use a model with a longer "
                "context",
                "messages",
            )
        try:
            text.encode()
        except UnicodeEncodeError:  # from tools or chat_template_kwargs, which are free JSON
            raise invalid(
                "the prompt holds half a character (a lone surrogate): send Unicode text",
                "messages",
            ) from None
        # The template writes bos itself where the model wants it.
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(token_ids) >= self._context:
            raise JobError(
                "context_length_exceeded",
                f"the messages make {len(token_ids)} tokens and the context holds {self._context}, "
                "the answer included: shorten the messages or use a model with a longer context",
                "messages",
            )
        return Prompt(text, token_ids)


def _check_served(request: ChatRequest) -> None:
    """Refuse what needs constrained output."""
    form = request.response_format
    if form is not None and form.type != "text":
        raise invalid(f"response_format {form.type} is not served: only text is", "response_format")
    if request.tool_choice not in (None, "auto", "none"):
        raise invalid(
            f"tool_choice {request.tool_choice!r} is not served: only auto and none are",
            "tool_choice",
        )


def _plain(message: Message, parts: bool) -> dict[str, Any]:
    """A message as templates know it, the parts of its content joined unless they know `parts`."""
    plain = message.to_dict()
    if message.content is not None and not parts:  # an absent field stays absent, not null
        plain["content"] = message.text
    if message.reasoning_content is not None:
        plain["thinking"] = message.reasoning_content  # the name that some templates use
    if plain["role"] == "developer":
        plain["role"] = "system"  # OpenAI's newer name; templates know the older one
    for call in plain.get("tool_calls", []):
        # Templates write arguments with tojson: they get the object, not its text.
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            continue
    return plain
