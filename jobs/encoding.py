"""JSON as chatjobs writes and reads it. Text may have lone surrogates: JSON can hold them, UTF-8
can't.

pydantic_core takes a third of the time of the standard library's json or less, but has narrower
limits: no lone surrogates, 200 levels. Where it refuses a value, json decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pydantic_core


def encodable(text: str) -> str:
    """`text` with lone surrogates escaped as `\\udXXX`."""
    return text.encode("utf-8", "backslashreplace").decode()


def to_json(value: Any) -> str:
    """Compact JSON that is valid UTF-8; lone surrogates become JSON escapes. Raises what json.dumps
    raises."""
    try:
        return pydantic_core.to_json(value).decode()
    except ValueError:
        return encodable(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def from_json(text: str | bytes) -> Any:
    """The value of JSON text. Raises what json.loads raises."""
    try:
        return pydantic_core.from_json(text)
    except ValueError:
        return json.loads(text)


class DuplicateKey(ValueError):
    """An object in JSON text has a key twice. `path`: the keys and indices that lead to it."""

    def __init__(self, path: Sequence[str | int]) -> None:
        self.path = tuple(path)
        super().__init__(self.at("").lstrip("."))

    def at(self, start: str, skipped: int = 0) -> str:
        """The sentence, with `start` for the first parts of the path."""
        inside = "".join(
            f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]"
            for part in self.path[skipped:]
        )
        return f"{start}{inside}: given twice in one object: keep one"


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError
    return value


_once = json.JSONDecoder(object_pairs_hook=_object_of)  # json.loads makes one for each call


class Parsed(NamedTuple):
    """A value, and the error of an object in it that has a key twice."""

    value: Any
    duplicate: DuplicateKey | None


def parse_written(text: str) -> Parsed:
    """The value of JSON text that a person or a program of theirs wrote: a key that an object has
    twice is an error of theirs. Raises what json.loads raises."""
    try:
        return Parsed(_once.decode(text), None)
    except ValueError:  # an object has a key twice, or it is no JSON
        pass
    found: list[tuple[dict[str, Any], str]] = []

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            names = [name for name, _ in pairs]
            found.append((value, next(name for name in names if names.count(name) > 1)))
        return value

    value = json.loads(text, object_pairs_hook=object_of)
    if not found:
        return Parsed(value, None)
    holder, key = found[-1]  # no object around it has a key twice, which might have dropped it
    return Parsed(value, DuplicateKey((*(_path(value, holder) or ()), key)))


def _path(value: Any, wanted: dict[str, Any]) -> tuple[str | int, ...] | None:
    """The keys and indices that lead from `value` to an object in it."""
    if value is wanted:
        return ()
    parts: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
    for part, inner in parts:
        rest = _path(inner, wanted)
        if rest is not None:
            return (part, *rest)
    return None


class JSONText:
    """A serializer for RQ: it writes JSON text as it is. RQ's own for JSON reads this as well."""

    @staticmethod
    def dumps(text: str | None) -> bytes:
        return (text or "null").encode()

    @staticmethod
    def loads(text: bytes) -> Any:
        return from_json(text)
