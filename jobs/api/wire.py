"""Base classes of the wire types: JSON in and out, and pydantic's errors as `InvalidRequest`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter, Signature
from typing import Annotated, Any, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictStr,
    ValidationError,
)

from jobs import encoding
from jobs.errors import InvalidRequest, invalid


class Wire(BaseModel):
    """Base of all wire types. Unknown fields are refused; `Output` ignores them."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), ser_json_inf_nan="strings")

    def to_dict(self) -> dict[str, Any]:
        """A JSON object, without the fields that are not set."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return encoding.to_json(self.to_dict())


class Output(Wire):
    """Base of the types that workers write and others read. Unknown fields are those of a later
    version, and are ignored."""

    model_config = ConfigDict(extra="ignore")


class Checked(Wire):
    """A wire type that users construct. A bad field raises `InvalidRequest`, which names it."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise to_invalid_request(error, type(self)) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Give help() the names of the fields; pydantic's own signature contains its internals."""
        super().__pydantic_init_subclass__(**options)
        required = [name for name, field in cls.model_fields.items() if field.is_required()]
        optional = [name for name in cls.model_fields if name not in required]
        cls.__signature__ = Signature(
            [Parameter(name, Parameter.KEYWORD_ONLY) for name in required]
            + [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in optional]
        )

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Construct from a JSON object (mapping, str or bytes). Raises InvalidRequest."""
        if isinstance(data, str | bytes | bytearray):
            data = json_of(data)
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise invalid(f"a request must be a JSON object, got {describe(data)}")
        bad = next((key for key in data if not isinstance(key, str)), None)
        if bad is not None:
            raise invalid(f"field names must be strings, got {bad!r}")
        return cls(**data)


def json_of(text: str | bytes | bytearray) -> Any:
    """The value of a request as JSON text. Raises InvalidRequest."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the request is {not_json(error)}") from None


def _json_number(value: Any) -> Any:
    """Refuses strings and booleans, which pydantic would convert."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, got {describe(value)}")
    return value


def no_lone_surrogates(value: str) -> str:
    """JSON can hold a lone surrogate, but UTF-8 can't, and so neither tokenizers nor files."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(value[error.start]):04x}"
        raise ValueError(
            f"{escape} at {error.start} is a lone surrogate, which is not valid Unicode: "
            "send valid Unicode text"
        ) from None
    return value


Number = Annotated[float, BeforeValidator(_json_number), Field(allow_inf_nan=False)]
Text = Annotated[StrictStr, AfterValidator(no_lone_surrogates)]


def describe(value: Any) -> str:
    """A value in an error message: its kind, or at most 60 characters of its repr."""
    names = {dict: "an object", list: "a list", type(None): "null", bool: "a boolean"}
    if type(value) in names:
        return names[type(value)]
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _meant(path: str, location: Sequence[str | int], model: type[BaseModel]) -> str:
    """A hint for the unknown field at `location` in a `model`: a similar field, or all fields."""
    name = str(location[-1])
    inside = path[: -len(name)]
    holder: type[BaseModel] | None = model
    for part in location[:-1]:
        if isinstance(part, str) and holder is not None and part in holder.model_fields:
            holder = _model_in(holder.model_fields[part].annotation)
    if holder is None:
        return "remove it"
    near = near_field(name, holder, parts=not inside)
    if near is not None:
        return f"did you mean '{inside}{near}'?"
    return f"known fields: {', '.join(_names(holder))}"


def _names(holder: type[BaseModel]) -> list[str]:
    """The fields that a user may give, also those that become others."""
    other: tuple[str, ...] = getattr(holder, "other_names", ())
    return sorted((*holder.model_fields, *other))


def near_field(name: str, holder: type[BaseModel], *, parts: bool = True) -> str | None:
    """The field of `holder`, or of one of its `parts`, that an unknown name may stand for."""
    close = get_close_matches(name, _names(holder), 1)
    for field in sorted(holder.model_fields):
        inner = _model_in(holder.model_fields[field].annotation)
        if inner is not None and name in inner.model_fields and parts:
            close = [f"{field}.{name}"]
    return close[0] if close else None


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The wire type in an annotation, such as `list[Message] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(part) for part in get_args(annotation))
    return next((one for one in found if one is not None), None)


def not_json(error: Exception) -> str:
    """The sentence for an exception of `json.loads`."""
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return f"not JSON: {error.msg} at {line}column {error.colno}"
    if isinstance(error, RecursionError):
        return "not JSON that can be read: nested too deep"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text: {error.reason} at byte {error.start}"
    digits = sys.get_int_max_str_digits()
    return f"not JSON that can be read: a number has more than {digits} digits"


# The form that a value must have, by pydantic's type of the fault.
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
}


def to_invalid_request(error: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    """One fault of a ValidationError as one sentence that names the field."""
    faults = error.errors(include_url=False)
    # A union reports the faults of all its branches. The deepest is from the one that fits best.
    fault = max(
        faults,
        key=lambda f: (
            f["type"] == "literal_error" and f["loc"][-1] == "type",
            f["type"] == "extra_forbidden",
            len(f["loc"]),
        ),
    )
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequest):
        return cause
    path = ""
    unknown = len(fault["loc"]) - 1 if fault["type"] == "extra_forbidden" else None
    for place, part in enumerate(fault["loc"]):
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() or place == unknown:  # others are pydantic's names of types
            path += f".{part}" if path else part
    param = path or None
    given = fault.get("input")
    if unknown is not None:
        return invalid(f"unknown field {path!r}; {_meant(path, fault['loc'], model)}", param)
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
    if fault["type"] in _EXPECTED:
        return invalid(f"{path}: expected {_EXPECTED[fault['type']]}, got {describe(given)}", param)
    text = text.removeprefix("Input should be ")
    text = f"must be {text}" if text != fault["msg"] else text[0].lower() + text[1:]
    return invalid(f"{path}: {text}, got {describe(given)}", param)
