"""Messages → token ids, by the checkpoint's own chat template in Jinja's sandbox.

The environment is that of transformers' `apply_chat_template`. Templates are untrusted code: they
see plain JSON values alone, and a rendering that lasts or grows too long is broken off: the clock
is looked at in every turn of a loop and every call of a macro, the size of every text that is put
together. What can't be bounded here is a single filter or text method that makes something
huge in one go (`x|center(10**9)`): load templates only from people whose weights you would load.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from jobs.types import ChatRequest, JobError, Message, invalid
from worker.loading.config import read_json
from worker.loading.tokenizer import CONFIG as TOKENIZER_CONFIG
from worker.loading.tokenizer import Tokenizer

MAX_CHARACTERS = 50_000_000  # of a rendered prompt, and of any text on its way there
MAX_SECONDS = 10.0  # of rendering
MAX_POWER = 10_000  # bits of a power's result
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


class _Refusal(jinja2.TemplateError):
    """The template itself said no, by raise_exception."""


class _Endless(Exception):
    """The template takes too long or writes too much."""


_deadline: ContextVar[float] = ContextVar("deadline of the rendering in this thread")


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with bounds on time and size."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.globals["namespace"] = _PlainNamespace
        del self.globals["lipsum"]  # writes as many words as it is told to, in one go

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Bounds(self).visit(tree)  # changes it in place
        tree.set_environment(self)
        return tree

    def tick(self) -> None:
        """Called by every turn of a loop and every call of a macro."""
        if time.monotonic() > _deadline.get():
            raise _Endless(f"it was broken off after {MAX_SECONDS:.0f} s")

    def join_texts(self, *values: Any) -> str:
        """What `~` does."""
        return self.concat([str(value) for value in values])

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Called for what a macro or a block writes."""
        pieces = list(pieces)
        _check_size(sum(map(len, pieces)))
        return "".join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                size = left.bit_length() * abs(right)
                if size > MAX_POWER:
                    raise _Endless(f"{left} ** {right} is too large")
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(times, int):
                    _check_size(len(items) * times)
        elif isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


class _Bounds(NodeTransformer):
    """Puts the environment's checks into a template."""

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment

    def _call(self, name: str, values: list[nodes.Expr], lineno: int) -> nodes.Call:
        method = nodes.EnvironmentAttribute(name, lineno=lineno)
        return nodes.Call(method, values, [], None, None, lineno=lineno)

    def _visit_block(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        tick = self._call("tick", [], node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _visit_block

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("join_texts", node.nodes, node.lineno)


class _PlainNamespace(Namespace):
    """`namespace()` without attributes that begin with an underscore, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't have the attribute {name!r}")


def _check_size(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise _Endless(f"it makes a text or list of {length} items")


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


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


class ChatTemplate:
    """The templates of one model. `source` is the default one's text."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        self.source = sources["default"]
        self.hash = hashlib.sha256(json.dumps(sorted(sources.items())).encode()).hexdigest()[:32]
        environment = _Environment()
        try:
            self._templates = {n: environment.from_string(text) for n, text in sources.items()}
        except Exception as error:  # untrusted code: Jinja's errors, and Python's own from compile
            raise JobError(
                "unsupported_model",
                f"the model's chat template is not valid Jinja ({type(error).__name__}: {error}): "
                "put a valid chat_template.jinja into its folder",
            ) from None

    @classmethod
    def read(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The templates of a model folder: chat_template.jinja counts before
        tokenizer_config.json, and that before chat_template.json; additional_chat_templates/ adds
        named ones. None if there is none."""
        sources: dict[str, str] = {}
        file, legacy = folder / "chat_template.jinja", folder / "chat_template.json"
        if file.is_file():
            sources["default"] = _text(file)
        elif configured := tokenizer.config.get("chat_template"):
            sources.update(_named(configured, folder / TOKENIZER_CONFIG))
        elif legacy.is_file():
            sources.update(_named(read_json(legacy).get("chat_template"), legacy))
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[path.stem] = _text(path)
        if not sources:
            return None
        sources.setdefault("default", next(iter(sources.values())))
        return cls(sources, tokenizer.special_tokens)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text that the model reads. Raises JobError: invalid_request where the template says
        no, unsupported_model where it is broken, leaves the sandbox or doesn't end."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        given = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces, length = [], 0
        token = _deadline.set(time.monotonic() + MAX_SECONDS)
        try:
            for piece in self._templates[name].generate(given):
                pieces.append(piece)
                length += len(piece)
                _check_size(length)
        except _Refusal as error:
            raise invalid(f"the model's chat template refuses: {error}", "messages") from None
        except SecurityError as error:
            raise JobError(
                "unsupported_model", f"the model's chat template leaves its sandbox: {error}"
            ) from None
        except _Endless as error:
            raise JobError(
                "unsupported_model", f"the model's chat template doesn't seem to end: {error}"
            ) from None
        except (RecursionError, MemoryError):
            raise JobError(
                "unsupported_model", "the model's chat template recurses without end"
            ) from None
        except Exception as error:  # untrusted code can raise anything
            raise invalid(
                f"the model's chat template fails on these messages: {error}", "messages"
            ) from None
        finally:
            _deadline.reset(token)
        return "".join(pieces)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise JobError(
            "unsupported_model", f"{path} can't be read ({error}): download the model again"
        ) from None


def _named(value: Any, where: Path) -> dict[str, str]:
    """A template, or a list of {name, template}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named = {}
    for entry in value if isinstance(value, list) else [None]:
        parts = entry if isinstance(entry, dict) else {}
        name, template = parts.get("name"), parts.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise JobError(
                "unsupported_model",
                f"{where}: chat_template must be a text or a list of {{name, template}}: put a "
                "valid chat_template.jinja beside it",
            )
        named[name] = template
    return named


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
        text = self._template.render([_plain(m) for m in request.messages], tools, variables)
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


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates know it."""
    plain = message.to_dict()
    if message.content is not None:  # else absent: templates know an absent field, not null
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
