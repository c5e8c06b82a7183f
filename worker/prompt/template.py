"""A model's own chat templates, rendered as transformers' `apply_chat_template` does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.api.chat_template import template_hash
from jobs.api.wire import describe
from jobs.errors import InvalidRequest, JobError, invalid
from worker.checkpoint.tokenizer import Tokenizer
from worker.prompt.sandbox import REMEDY, WHOSE, Sandbox, shared_sandbox

if TYPE_CHECKING:  # it imports torch, which a gateway does without
    from worker.checkpoint.source import ModelSource

MAX_PATH = 4096  # characters
NO_TEMPLATE = (
    "has no chat template: use a chat (instruct) checkpoint, put a chat_template.jinja into its "
    "folder, or start it with --chat-template FILE"
)
# A tool that shows whether a template takes tools, and how it writes a call.
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_place",
        "description": "Find a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Its name."}},
            "required": ["place"],
        },
    },
}
PROBE_QUESTION = {"role": "user", "content": "a7q"}
PROBE_CALL: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [
        {
            "id": "call00001",  # some templates want nine characters
            "type": "function",
            "function": {"name": "find_place", "arguments": {"place": "Atlantis"}},
        }
    ],
}


class ChatTemplate:
    """The templates of one model. Raises JobError("unsupported_model") if one isn't valid Jinja.

    `sources`: by name. `source`: the text of the default one. `takes_parts`: whether it handles a
    list of content parts, or only strings. `sandbox`: renders them; by default that of the models.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        sandbox: Sandbox | None = None,
    ) -> None:
        self._special_tokens, self.sources = special_tokens, sources
        self._sandbox = sandbox or shared_sandbox()
        self.source = sources.get("default") or next(iter(sources.values()))
        self.hash = template_hash(sources)
        for source in sources.values():
            self._sandbox.check(source)
        self.takes_parts = self._probe()

    @classmethod
    def of(cls, model: ModelSource) -> ChatTemplate | None:
        """The templates of a model; None if it has none. Raises JobError."""
        sources = model.chat_templates
        return cls(sources, model.special_tokens) if sources else None

    @classmethod
    def from_file(cls, path: Path, model: ModelSource) -> ChatTemplate:
        """A template that takes the place of the model's own. Raises JobError, also if it can't
        render a question."""
        try:
            text = template_path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = "is not UTF-8 text" if isinstance(error, ValueError) else "can't be read"
            detail = getattr(error, "strerror", None) or error
            raise invalid(f"chat template {path} {reason}: {detail}", "chat_template") from None
        if not text.strip():
            fact = "is empty: write a Jinja template into it"
            raise invalid(f"chat template {path} {fact}", "chat_template")
        try:
            template = cls({"default": text}, model.special_tokens)
            with suppress(InvalidRequest):  # it may take other messages
                template.render([PROBE_QUESTION])
            return template
        except JobError as error:
            require_fault_of_template(error)
            fact = error.message.removeprefix(WHOSE).removesuffix(REMEDY)
            raise invalid(f"chat template {path}{fact}", "chat_template") from None

    @cached_property
    def takes_tools(self) -> bool:
        """True if tools change the rendered text. A template that fails on the probe may take
        others, so it counts as taking them."""
        messages = [PROBE_QUESTION]
        try:
            return self.render(messages, [PROBE_TOOL]) != self.render(messages)
        except JobError as error:
            require_fault_of_template(error)
            return True

    @cached_property
    def calls_need_content(self) -> bool:
        """True if an answer of tool calls alone must have an empty content instead of none, as for
        Qwen3's first template."""
        try:
            self.render([PROBE_QUESTION, PROBE_CALL], [PROBE_TOOL], add_generation_prompt=False)
        except JobError as error:
            require_fault_of_template(error)
            return True
        return False

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text. Raises JobError: invalid_request if the template rejects the messages,
        unsupported_model if it is broken, is blocked by the sandbox, or exceeds its limits."""
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise JobError("unsupported_model", f"the model {self.no_default}")
        values = {
            **self._special_tokens,
            "documents": None,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._sandbox.render(self.sources[name], values)

    @property
    def has_default(self) -> bool:
        return "default" in self.sources

    @property
    def no_default(self) -> str:
        """The fact that there is no default template, and what to do."""
        return (
            f"has chat templates for {', '.join(sorted(self.sources))} and no default one: put a "
            "chat_template.jinja into its folder, or start it with --chat-template FILE"
        )

    def mentions(self, word: str) -> bool:
        """True if a word occurs in any of the templates."""
        return any(word in source for source in self.sources.values())

    def _probe(self) -> bool:
        """True if the default template renders the texts of a list of content parts."""
        parts = [{"type": "text", "text": text} for text in ("a7q", "b7q")]
        try:
            text = self.render([{"role": "user", "content": parts}])
        except JobError as error:
            require_fault_of_template(error)
            return False
        dumped = "'type'" in text or '"type"' in text
        return "a7q" in text and "b7q" in text and not dumped


def chat_obstacle(template: ChatTemplate | None) -> str | None:
    """The reason for which chat requests fail with the templates of a model, with the remedy; None
    if they don't."""
    if template is None:
        return NO_TEMPLATE
    return None if template.has_default else template.no_default


def template_path(given: str | Path) -> Path:
    """The path of a template's file. Raises JobError for the text of a template."""
    text = str(given)
    if not text.strip() or len(text) > MAX_PATH or any(sign in text for sign in ("{%", "{{", "\n")):
        fact = f"must be the path of a file with a Jinja template, got {describe(text)}"
        raise invalid(f"chat_template {fact}", "chat_template")
    return Path(given)


def require_fault_of_template(error: JobError) -> None:
    """Raise an error that says nothing about the template: the process that renders it failed."""
    if error.code == "internal":
        raise error


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The special token that the template writes after an assistant message, if any."""
    marker = "x7q"
    try:
        text = template.render(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}],
            add_generation_prompt=False,
        )
        _, _, after = text.rpartition(marker)
        ids = tokenizer.encode(after.lstrip())
    except JobError as error:
        require_fault_of_template(error)
        return None
    return ids[0] if ids and tokenizer.is_special(ids[0]) else None
