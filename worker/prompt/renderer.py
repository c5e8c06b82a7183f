"""The process that renders chat templates: `python -m worker.prompt.renderer BYTES`.

Templates are untrusted code. Jinja's sandbox keeps them from leaving, and this process of their own
from taking a worker with them: it may use so many BYTES of memory, and each rendering so much time
on a core, even within one call of a filter; the system ends it if it uses more.

One JSON object per line comes in: `template`, `values` (null: compile only), `seconds`. One goes
out: `text`, or what went wrong as `refused`, `escaped`, `endless`, `failed` or `invalid`.

The environment is that of transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
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

MAX_CHARACTERS = 50_000_000  # of a rendered prompt


class Refusal(jinja2.TemplateError):
    """The template itself said no, by raise_exception."""


class Generation(Extension):
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


def make_environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
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
    """What a template makes of `values`, as an answer."""
    pieces, length = [], 0
    try:
        for piece in template.generate(values):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_CHARACTERS:
                return {"endless": f"it writes more than {MAX_CHARACTERS} characters"}
    except Refusal as error:
        return {"refused": str(error)}
    except SecurityError as error:
        return {"escaped": str(error)}
    except MemoryError:
        return {"endless": "it takes too much memory"}
    except RecursionError:
        return {"endless": "it recurses"}
    except Exception as error:  # untrusted code can raise anything
        return {"failed": " ".join(str(error).split())}
    return {"text": "".join(pieces)}


def main() -> None:
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    environment = make_environment()
    compiled = lru_cache(maxsize=64)(environment.from_string)

    def answer(template: str, values: dict[str, Any] | None) -> dict[str, str]:
        try:
            ready = compiled(template)
        except MemoryError:
            return {"endless": "it takes too much memory"}
        except Exception as error:  # Jinja's errors, and Python's own from compile
            return {"invalid": f"{type(error).__name__}: {error}"}
        return {"text": ""} if values is None else render(ready, values)

    for line in sys.stdin.buffer:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])  # then SIGPROF ends the process
        try:
            said = json.dumps(answer(asked["template"], asked["values"]))
        except MemoryError:
            said = json.dumps({"endless": "it takes too much memory"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(said + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
