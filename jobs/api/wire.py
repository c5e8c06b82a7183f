"""What all wire types share: JSON in and out, checked by pydantic, its words turned into ours."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictStr,
    ValidationError,
)

from jobs.errors import InvalidRequest, invalid

MAX_DEPTH = 64  # of nested lists and objects in one field
MAX_BITS = 1024  # of a whole number


class Wire(BaseModel):
    """Base of all wire types: unknown fields are refused, values are taken by their JSON type."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), ser_json_inf_nan="strings")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the fields that are not set."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False, separators=(",", ":"))


class Checked(Wire):
    """A wire type that users build: a bad field raises `InvalidRequest`, which names it."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise explain(error, type(self)) from None

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Build from a JSON object (dict, str or bytes). Raises InvalidRequest."""
        if isinstance(data, str | bytes | bytearray):
            try:
                data = json.loads(data)
            except ValueError as error:
                raise invalid(f"the request is not valid JSON: {error}") from None
        if isinstance(data, cls):
            return data
        if not isinstance(data, dict):
            raise invalid(f"a request is a JSON object, got {kind_of(data)}")
        bad = next((key for key in data if not isinstance(key, str)), None)
        if bad is not None:
            raise invalid(f"field names are strings, got {bad!r}")
        return cls(**data)


def _only_numbers(value: Any) -> Any:
    """JSON numbers only: no strings, no booleans."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, got {kind_of(value)}")
    return value


def _whole_characters(value: str) -> str:
    """JSON can spell half a character (a lone surrogate); no tokenizer and no file takes it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        fact = f"{half} at {error.start} is half a character: send Unicode text"
        raise ValueError(fact) from None
    return value


def check_json(value: Any, depth: int, field: str) -> None:
    """Raises ValueError for what is nested deeper than `depth` or holds an endless number."""
    if isinstance(value, dict | list | tuple):
        if not depth:
            raise ValueError(f"{field} is nested deeper than {MAX_DEPTH} levels")
        for item in value.values() if isinstance(value, dict) else value:
            check_json(item, depth - 1, field)
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"{field} holds a number of more than {MAX_BITS} bits")


Number = Annotated[float, BeforeValidator(_only_numbers), Field(allow_inf_nan=False)]
Text = Annotated[StrictStr, AfterValidator(_whole_characters)]


def kind_of(value: Any) -> str:
    """A value as a person would name it, short."""
    names = {dict: "an object", list: "a list", type(None): "null", bool: "a boolean"}
    if type(value) in names:
        return f"{names[type(value)]}"
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def explain(error: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    """The first fault of a ValidationError, in one sentence with the field's name."""
    faults = error.errors(include_url=False)
    # In a union the branch that came deepest knows best what was meant.
    fault = max(
        faults,
        key=lambda f: (
            f["type"] == "literal_error" and f["loc"][-1] == "type",
            f["type"] == "extra_forbidden",
            len(f["loc"]),
        ),
    )
    path = ""
    for part in fault["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
    param = path or None
    given = fault.get("input")
    if fault["type"] == "extra_forbidden":
        inside = path.rpartition(".")[0]
        known = ", ".join(sorted(model.model_fields)) if not inside else ""
        hint = f"; fields are: {known}" if known else "; remove it"
        return invalid(f"unknown field '{path}'{hint}", param)
    if fault["type"] == "missing":
        return invalid(f"field '{path}' is required", param)
    if fault["type"] in ("too_short", "string_too_short"):
        return invalid(f"{path} is empty", param)
    text = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        if param is None:
            word = re.match(r"\w+", text)
            param = word[0] if word and word[0] in model.model_fields else None
            return invalid(text, param)
        return invalid(f"{path}: {text}", param)
    text = text[0].lower() + text[1:]
    return invalid(f"{path}: {text}, got {kind_of(given)}", param)
