"""Child process that renders chat templates: `python -m worker.prompt.renderer BYTES`.

Templates are untrusted code. Jinja's sandbox keeps them from reaching Python's internals, and the
separate process protects the worker from excessive use of resources: its address space is limited
to BYTES, and each rendering to a CPU time, after which the kernel kills the process, even within a
single call of a filter.

Protocol: one JSON object per line. Request: `template`, `values` (null: compile only), `seconds`,
and perhaps `strict` (a name that has no value is an error).
Reply: `text`, or the reason of a failure as one of
    invalid  the template doesn't compile
    refused  the template called raise_exception
    escaped  Jinja's sandbox forbids what the template does
    endless  too much memory, output or recursion
    failed   any other error in the template

The environment is that of transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from worker.processes.memory_limit import limit_memory
from worker.prompt import limited_child

MAX_CHARACTERS = 50_000_000  # of a rendered prompt
OUT_OF_MEMORY = {"endless": "it takes too much memory"}


class Refusal(jinja2.TemplateError):
    """The template called raise_exception."""


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant turns for training; only its body is
    rendered here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class PlainNamespace(Namespace):
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


def make_environment(*, strict: bool = False) -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined if strict else jinja2.Undefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = PlainNamespace
    return environment


def render(template: jinja2.Template, values: dict[str, Any]) -> dict[str, str]:
    """Render a compiled template; returns a reply."""
    chunks, length = [], 0
    try:
        for chunk in template.generate(values):
            chunks.append(chunk)
            length += len(chunk)
            if length > MAX_CHARACTERS:
                return {"endless": f"it writes more than {MAX_CHARACTERS} characters"}
    except Refusal as error:
        return {"refused": str(error)}
    except SecurityError as error:
        return {"escaped": str(error)}
    except MemoryError:
        return OUT_OF_MEMORY
    except RecursionError:
        return {"endless": "it recurses"}
    except Exception as error:  # untrusted code can raise anything
        return {"failed": " ".join(f"{error}{_place(error)}".split())}
    return {"text": "".join(chunks)}


def _place(error: Exception) -> str:
    """The line of the template that an error comes from, if it is known."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [one.lineno for one in frames if one.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    return "" if line is None else f" (line {line})"


def main() -> None:
    limit_memory(int(sys.argv[1]))
    environments = {strict: make_environment(strict=strict) for strict in (False, True)}

    @lru_cache(maxsize=64)
    def compiled(template: str, strict: bool) -> jinja2.Template:
        return environments[strict].from_string(template)

    def reply_to(template: str, values: dict[str, Any] | None, strict: bool) -> dict[str, str]:
        try:
            ready = compiled(template, strict)
        except MemoryError:
            return OUT_OF_MEMORY
        except Exception as error:  # Jinja's errors, and Python's own from compile
            return {"invalid": f"{type(error).__name__}: {error}{_place(error)}"}
        return {"text": ""} if values is None else render(ready, values)

    for request in limited_child.requests():
        try:
            reply = json.dumps(
                reply_to(request["template"], request["values"], request.get("strict", False))
            )
        except MemoryError:
            reply = json.dumps(OUT_OF_MEMORY)
        limited_child.send(reply)


if __name__ == "__main__":
    main()
