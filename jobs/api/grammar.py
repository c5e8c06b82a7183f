"""Grammars that hold an answer to a form: made of what a request gives, and checked by llguidance.

Requests come from users, so that each limit is here: the size of what is given, of the grammar, and
of the work for one token. The client checks with the limits of the worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from jobs.errors import JobError, invalid
from jobs.sizes import counted

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_CHARACTERS = 2**16  # of a schema as JSON text, of a regular expression, choices or a grammar
MAX_SPACES = 8  # of white space between the tokens of JSON: models repeat it without end
_JSON_OPTIONS = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_SPACES}}}",
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,  # else keywords that are not supported are ignored
    "coerce_one_of": False,
}
# Most characters of formats that may have any number of digits after the second, with nanoseconds:
# models go on with digits without end.
_LONGEST_OF_FORMAT = {
    "time": len("00:00:00.000000000+00:00"),
    "date-time": len("0000-00-00T00:00:00.000000000+00:00"),
}
_DATA = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
_KNOWN_CHECKS = 256  # distinct grammars whose check is remembered
_WAYS = "remove it, or check the answer afterwards"

Parts = list[dict[str, Any]]  # grammars of llguidance: the first may name the others


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer may be. `text`: JSON text of its parts; `field`: of the request, in errors."""

    text: str
    field: str

    @property
    def parts(self) -> Parts:
        found: Parts = json.loads(self.text)
        return found


def of_schema(schema: dict[str, Any], field: str, **options: Any) -> Grammar:
    """JSON that a schema describes. `options`: further ones of llguidance's JSON grammars."""
    plain = {key: value for key, value in _bounded(schema).items() if key != "x-guidance"}
    return _grammar([{"json_schema": {**plain, "x-guidance": {**_JSON_OPTIONS, **options}}}], field)


def of_regex(pattern: str, field: str) -> Grammar:
    """Text that a regular expression matches as a whole."""
    _limit(pattern, field)
    from llguidance import LLMatcher

    return _grammar(json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"], field)


def of_choice(choices: Sequence[str], field: str) -> Grammar:
    """One of some texts."""
    return _grammar([{"lark_grammar": f"start: {' | '.join(map(quoted, choices))}"}], field)


def of_grammar(text: str, field: str) -> Grammar:
    """Text of a context-free grammar, in the syntax of Lark or of GBNF. Raises InvalidRequest."""
    _limit(text, field)
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = any_to_lark(text)
    except Exception as error:  # the library raises several
        raise invalid(f"{field}: it is neither Lark nor GBNF: {_line(error)}", field) from None
    return _grammar([{"lark_grammar": lark}], field)


def of_tags(tags: Sequence[tuple[str, str, dict[str, Any], str]], field: str) -> Grammar:
    """Free text in which a trigger begins a structure. `tags`: the trigger, the beginning of the
    structure, which begins with it, the schema of the JSON that follows, and the end."""
    rules, schemas = ["TEXT: /(?s:.*)/"], []
    for number, (trigger, begin, schema, end) in enumerate(tags):
        rules.append(f"head_{number}[lazy]: TEXT {quoted(trigger)}")
        rest = [quoted(one) if one else "" for one in (begin[len(trigger) :], end)]
        rules.append(f"tag_{number}: head_{number} {rest[0]} @json_{number} {rest[1]}")
        schemas.append({"name": f"json_{number}", **of_schema(schema, field).parts[0]})
    names = " | ".join(f"tag_{number}" for number in range(len(tags)))
    lark = "\n".join([f"start: ({names})* tail", "tail: TEXT", *rules])
    return _grammar([{"lark_grammar": lark}, *schemas], field)


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def joined(parts: Parts) -> str:
    """The text of parts as llguidance reads it."""
    return json.dumps({"grammars": parts})


def named(name: str, grammar: Grammar) -> Parts:
    """The parts of a grammar, for another one that refers to it as `@name`."""
    first, *others = grammar.parts
    return [{**first, "name": name}, *others]


def _bounded(schema: Any) -> Any:
    """A schema with a limit for the texts of formats that have none."""
    if isinstance(schema, list):
        return [_bounded(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: one if key in _DATA else _bounded(one) for key, one in schema.items()}
    form = schema.get("format")
    if isinstance(form, str) and form in _LONGEST_OF_FORMAT:
        found.setdefault("maxLength", _LONGEST_OF_FORMAT[form])
    return found


@cache
def limits() -> LLParserLimits:
    """Limits of a grammar and of the work for one token: about half a second and a tenth of one."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=10_000,
        verbose_errors=False,
    )


def check(grammar: Grammar) -> None:
    """Raises InvalidRequest for a grammar that is not supported, too large or can't be met."""
    fault = _fault(grammar.text)
    if fault:
        raise refusal(fault, grammar)


def refusal(fault: str, grammar: Grammar) -> JobError:
    """The error of a grammar, made of what llguidance says about it."""
    field = grammar.field
    schemas = [one["json_schema"] for one in grammar.parts if "json_schema" in one]
    schema = schemas[0] if len(schemas) == 1 else schemas or None
    if re.search(r"too (big|large|many|complex)|fuel|limit", fault):
        return invalid(f"{field}: it is too large ({_line(fault)}): give a smaller one", field)
    if schema is None:
        return invalid(f"{field}: {_reason(fault)}", field)
    for pattern, find in _KEYWORDS:
        found = re.search(pattern, fault)
        if found is not None:
            return invalid(f"{field}: {find(schema, found)}: {_WAYS}", field)
    return invalid(f"{field}: no answer can be made of the schema ({_line(fault)})", field)


@lru_cache(maxsize=_KNOWN_CHECKS)
def _fault(text: str) -> str:
    from llguidance import LLMatcher

    fault: str = LLMatcher.validate_grammar(joined(json.loads(text)), None, limits=limits())
    return fault


def _grammar(parts: Parts, field: str) -> Grammar:
    text = json.dumps(parts, ensure_ascii=False)
    _limit(text, field)
    return Grammar(text, field)


def _limit(text: str, field: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise invalid(
            f"{field}: it has {counted(len(text), 'character')} and at most {MAX_CHARACTERS} are "
            "taken: give a smaller one",
            field,
        )


def _line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _reason(fault: str) -> str:
    """The reason in an error about a regular expression or grammar, without its quotations."""
    causes = [line for line in fault.splitlines() if line.startswith("error: ")]
    return causes[0].removeprefix("error: ") if causes else _line(fault)


def _unimplemented(schema: Any, found: re.Match[str]) -> str:
    names = re.findall(r'"([^"]+)"', found[1])
    return _not_supported(schema, names)


def _not_supported(schema: Any, names: Sequence[str]) -> str:
    places = [place for name in names if (place := _place_of(schema, name))]
    written = " and ".join(f'"{name}"' for name in names)
    keywords = "the keyword" if len(names) == 1 else "the keywords"
    are = "is" if len(names) == 1 else "are"
    at = f" (at {places[0]})" if places else ""
    return f"{keywords} {written} of JSON Schema {are} not supported{at}"


_KEYWORDS = (
    (r"Unimplemented keys: \[(.*)\]", _unimplemented),
    (r"oneOf constraints", lambda schema, _: _not_supported(schema, ["oneOf"]) + "; anyOf is"),
    (
        r"min/maxProperties only supported",
        lambda schema, _: (
            'the keywords "minProperties" and "maxProperties" are only supported where all '
            "properties are required"
        ),
    ),
    (
        r"Unknown format: (.*)",
        lambda schema, found: f'the keyword "format" does not know {found[1]!r}',
    ),
    (
        r"not present in a registry",
        lambda schema, _: 'the keyword "$ref" is only supported within the schema',
    ),
    (
        r"regex|lookaround",
        lambda schema, found: (
            f'the keyword "pattern" has an expression that is not supported '
            f"({_reason(found.string)})"
        ),
    ),
)


def _place_of(schema: Any, name: str) -> str | None:
    return next(_places(schema, name, "$"), None)


def _places(value: Any, name: str, path: str) -> Iterator[str]:
    """Paths of the objects that have a key."""
    if isinstance(value, dict):
        if name in value:
            yield path
        for key, inner in value.items():
            yield from _places(inner, name, f"{path}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _places(inner, name, f"{path}[{number}]")
