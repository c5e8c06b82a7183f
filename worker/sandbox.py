"""Jinja's sandbox with bounds on time and size, and what transformers gives chat templates.

Templates are untrusted code: they see plain JSON values alone, and a rendering that lasts or grows
too long is broken off: the clock is looked at in every turn of a loop and every call of a macro,
the size of every text that is put together. What can't be bounded here is a single filter or text
method that makes something huge in one go (`x|center(10**9)`): load templates only from people
whose weights you would load.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
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

MAX_CHARACTERS = 50_000_000  # of a rendered prompt, and of any text on its way there
MAX_SECONDS = 10.0  # of rendering
MAX_POWER = 10_000  # bits of a power's result


class Refusal(jinja2.TemplateError):
    """The template itself said no, by raise_exception."""


class Endless(Exception):
    """The template takes too long or writes too much."""


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


_deadline: ContextVar[float] = ContextVar("deadline of the rendering in this thread")


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates with `from_string`, renders them with `write`."""

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

    def write(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        """The text that a template makes of `values`. Raises Refusal, Endless, and whatever else
        untrusted code raises."""
        pieces, length = [], 0
        token = _deadline.set(time.monotonic() + MAX_SECONDS)
        try:
            for piece in template.generate(values):
                pieces.append(piece)
                length += len(piece)
                _check_size(length)
        finally:
            _deadline.reset(token)
        return "".join(pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Bounds(self).visit(tree)  # changes it in place
        tree.set_environment(self)
        return tree

    def tick(self) -> None:
        """Called by every turn of a loop and every call of a macro."""
        if time.monotonic() > _deadline.get():
            raise Endless(f"it was broken off after {MAX_SECONDS:.0f} s")

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
                    raise Endless(f"{left} ** {right} is too large")
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(times, int):
                    _check_size(len(items) * times)
        elif isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


class _Bounds(NodeTransformer):
    """Puts the environment's checks into a template."""

    def __init__(self, environment: Sandbox) -> None:
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
        raise Endless(f"it makes a text or list of {length} items")


def _raise_exception(message: object) -> NoReturn:
    raise Refusal(str(message))


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
