"""Messages → token ids, by the checkpoint's own chat template in Jinja's sandbox.

The environment is that of transformers' `apply_chat_template`. Templates are untrusted code: they
see plain JSON values alone, and a rendering that grows or lasts too long is broken off.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jobs.types import ChatRequest, JobError, Message, invalid
from worker.loading.config import read_json
from worker.loading.tokenizer import Tokenizer

MAX_CHARACTERS = 50_000_000  # of a rendered prompt
MAX_SECONDS = 10.0  # of rendering; looked at whenever the template writes something
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True)
class Prompt:
    """A request, rendered: its text and its token ids."""

    text: str
    token_ids: list[int]


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant turns for training; here it does
    nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateRefusal(jinja2.TemplateError):
    """The template itself said no, by raise_exception."""


def _raise_exception(message: object) -> NoReturn:
    raise _TemplateRefusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """The templates of one model. `source` is the default one's text."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        self.source = sources["default"]
        self.hash = hashlib.sha256(json.dumps(sorted(sources.items())).encode()).hexdigest()[:32]
        environment = _environment()
        try:
            self._templates = {n: environment.from_string(text) for n, text in sources.items()}
        except jinja2.TemplateError as error:
            raise JobError(
                "unsupported_model", f"the model's chat template is not valid Jinja: {error}"
            ) from None

    @classmethod
    def read(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The templates of a model folder: chat_template.jinja counts before
        tokenizer_config.json, and that before chat_template.json. None if there is none."""
        sources: dict[str, str] = {}
        legacy = folder / "chat_template.json"
        if legacy.is_file():
            sources.update(_named(read_json(legacy).get("chat_template"), legacy))
        sources.update(_named(tokenizer.config.get("chat_template"), folder))
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[path.stem] = path.read_text(encoding="utf-8")
        file = folder / "chat_template.jinja"
        if file.is_file():
            sources["default"] = file.read_text(encoding="utf-8")
        if not sources:
            return None
        sources.setdefault("default", next(iter(sources.values())))
        return cls(sources, tokenizer.special_tokens)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text that the model reads. Raises JobError: invalid_request where the template says
        no, unsupported_model where it is broken, leaves the sandbox or doesn't end."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        given = {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        deadline = time.monotonic() + MAX_SECONDS
        pieces, length = [], 0
        try:
            for piece in self._templates[name].generate(given):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_CHARACTERS or time.monotonic() > deadline:
                    raise JobError(
                        "unsupported_model",
                        f"the model's chat template was broken off after {length} characters and "
                        f"{MAX_SECONDS:.0f} s at most: it doesn't seem to end",
                    )
        except _TemplateRefusal as error:
            raise invalid(f"the model's chat template refuses: {error}", "messages") from None
        except SecurityError as error:
            raise JobError(
                "unsupported_model", f"the model's chat template leaves its sandbox: {error}"
            ) from None
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise invalid(
                f"the model's chat template fails on these messages: {error}", "messages"
            ) from None
        except (RecursionError, MemoryError):
            raise JobError(
                "unsupported_model", "the model's chat template recurses without end"
            ) from None
        return "".join(pieces)


def _named(value: Any, where: Path) -> dict[str, str]:
    """A template, or a list of {name, template}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError):
        raise JobError(
            "unsupported_model",
            f"{where}: chat_template must be a text or a list of named templates",
        ) from None


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
        text = self._template.render([_plain(m) for m in request.messages], tools, **variables)
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


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates know it."""
    plain = message.to_dict()
    plain["content"] = message.text if message.content is not None else None
    if plain["role"] == "developer":
        plain["role"] = "system"  # OpenAI's newer name; templates know the older one
    for call in plain.get("tool_calls", []):
        # Templates write arguments with tojson: they get the object, not its text.
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except ValueError:
            continue
    return plain


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The special token that the template puts after an assistant's words, if any."""
    marker = "x7q"
    try:
        text = template.render(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}],
            add_generation_prompt=False,
        )
    except JobError:
        return None
    _, _, after = text.rpartition(marker)
    ids = tokenizer.encode(after.lstrip())
    return ids[0] if ids and tokenizer.is_special(ids[0]) else None
