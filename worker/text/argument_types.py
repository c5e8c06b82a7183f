"""Arguments that are written as text get the types that the function's JSON schema states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from worker.text.tool_call import MAX_ARGUMENT_DEPTH, Malformed, parse_json
from worker.text.tool_python import parse_literal

MAX_SCHEMAS = 1000  # that are read for one parameter: references may form a cycle or a large tree
EXACT = 2**53  # floats up to here are whole numbers exactly
_TYPES: dict[str, frozenset[str]] = {
    name: frozenset((name,)) for name in ("array", "boolean", "integer", "null", "object", "string")
}
_TYPES["number"] = frozenset(("integer", "number"))
# The type that a keyword implies in a schema without one.
_IMPLIED = {
    "properties": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
}


@dataclass(frozen=True, slots=True)
class Allowed:
    """The types and values that a schema allows. None: it doesn't restrict them."""

    types: frozenset[str] | None = None
    values: Mapping[str, Any] | None = None  # of enum and const, by their JSON text

    def and_also(self, other: Allowed) -> Allowed:
        types, values = self.types, self.values
        if types is None or other.types is None:
            types = other.types if types is None else types
        else:
            types &= other.types
        if values is None or other.values is None:
            values = other.values if values is None else values
        else:
            values = {key: value for key, value in values.items() if key in other.values}
        return Allowed(types, values)

    @staticmethod
    def one_of(options: Iterable[Allowed]) -> Allowed:
        """Options that don't say anything add nothing."""
        known = [one for one in options if one.types is not None]
        if not known:
            return Allowed()
        types = frozenset[str]().union(*(one.types or () for one in known))
        listed = [one.values for one in known if one.values is not None]
        if len(listed) < len(known):
            return Allowed(types)
        return Allowed(types, {key: value for one in listed for key, value in one.items()})

    def value(self, text: str) -> Any:
        """The value that a text writes, as in JSON or in Python: one of those listed, else one of a
        type other than string; else the text itself."""
        values, types = self.values or {}, (self.types or frozenset()) - _TYPES["string"]
        for one in (text, text.strip()):
            if _key(one) in values:
                return one
        if not values and not types:
            return text
        for parse in (parse_json, parse_literal):
            try:
                found = parse(text.strip())
            except Malformed:
                continue
            if "number" not in types:
                found = _whole(found)
            if _key(found) in values or _type_of(found) in types:
                return found
        return text


class ArgumentTypes:
    """The arguments of one function. `parameters`: the JSON schema of the object of them all."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._root = parameters
        self._known: dict[str, Allowed] = {}
        self._left = 0  # number of schemas that may still be read for the present parameter

    def value(self, name: str, text: str) -> Any:
        """The argument that a text writes."""
        if name not in self._known:
            self._left = MAX_SCHEMAS
            self._known[name] = self._through(self._root, lambda one: self._property(one, name))
        return self._known[name].value(text)

    def _property(self, schema: Mapping[str, Any], name: str) -> Allowed:
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return self._through(properties[name], _stated)
        return self._through(schema.get("additionalProperties"), _stated)

    def _through(
        self,
        schema: Any,
        own: Callable[[Mapping[str, Any]], Allowed],
        depth: int = MAX_ARGUMENT_DEPTH,
    ) -> Allowed:
        """The types and values that a schema, and those that it is combined of, allow."""
        if not isinstance(schema, Mapping) or not depth or not self._left:
            return Allowed()
        self._left -= 1
        found = own(schema)
        if isinstance(reference := schema.get("$ref"), str):
            found = found.and_also(self._through(self._target(reference), own, depth - 1))
        for option in _list(schema.get("allOf")):
            found = found.and_also(self._through(option, own, depth - 1))
        for key in ("anyOf", "oneOf"):
            options = [self._through(option, own, depth - 1) for option in _list(schema.get(key))]
            found = found.and_also(Allowed.one_of(options))
        return found

    def _target(self, reference: str) -> Any:
        """The schema at a JSON pointer, such as #/$defs/Name. Others are most often of objects."""
        base, _, pointer = reference.partition("#")
        if base or (pointer and not pointer.startswith("/")):
            return {"type": "object"}
        schema: Any = self._root
        for part in unquote(pointer).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, Mapping):
                schema = schema.get(key)
            elif isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
                schema = schema[int(key)]
            else:
                schema = None
        return {"type": "object"} if schema is None else schema


def _stated(schema: Mapping[str, Any]) -> Allowed:
    """The types and values that a schema itself allows."""
    given = [one for one in _list(schema.get("type")) if isinstance(one, str) and one in _TYPES]
    types = frozenset[str]().union(*(_TYPES[one] for one in given)) if given else None
    if types is not None and schema.get("nullable") is True:  # OpenAPI 3.0
        types |= _TYPES["null"]
    listed = schema.get("enum")
    if "const" in schema:
        listed = [schema["const"]]
    if isinstance(listed, list):
        values = {_key(value): value for value in listed}
        return Allowed(types).and_also(Allowed(frozenset(map(_type_of, listed)), values))
    if types is None and not {"$ref", "allOf", "anyOf", "oneOf"} & schema.keys():
        implied = frozenset(kind for key, kind in _IMPLIED.items() if key in schema)
        types = implied or None
    return Allowed(types)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _type_of(value: Any) -> str:
    if isinstance(value, bool):  # before int
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "null" if value is None else "array" if isinstance(value, list) else "object"


def _whole(value: Any) -> Any:
    """A number such as 2.0 as an integer, which it is in JSON."""
    whole = isinstance(value, float) and abs(value) <= EXACT and value.is_integer()
    return int(value) if whole else value


def _key(value: Any) -> str:
    """The same text for equal values."""
    return json.dumps(_whole(value), sort_keys=True)
