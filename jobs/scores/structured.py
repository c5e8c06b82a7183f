"""Metrics of answers in JSON: json and json-schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.errors import invalid
from jobs.scores.outcome import Outcome, Row, verdict


class ValidJson:
    """1 if the answer is JSON. NaN and Infinity are not."""

    def __init__(self, argument: str | None) -> None:
        if argument is not None:
            raise invalid("json takes no argument; json-schema:FILE checks a schema", "metric")

    def score(self, row: Row) -> Outcome:
        try:
            parsed(row["text"], integer=str)  # as fast for millions of digits
        except ValueError as error:
            return verdict(False, None, str(error))
        return verdict(True)


class JsonSchema:
    """1 if the answer is JSON that fits a schema: that of a file, or of the request's
    response_format. References to other documents are not followed."""

    def __init__(self, file: str | None) -> None:
        import jsonschema
        import referencing

        self._library, self._registry = jsonschema, referencing.Registry()
        self._validators: dict[str, Any] = {}
        self._fixed: str | None = None
        if file is not None:
            self._fixed = _read(file)
            try:
                self._validator(self._fixed)
            except ValueError as error:
                raise invalid(f"{file}: {error}", "metric") from None

    def score(self, row: Row) -> Outcome:
        validator = self._validator(self._fixed or _schema_of(row))
        try:
            value = parsed(row["text"])
        except ValueError as error:
            return verdict(False, None, str(error))
        fault = next(validator.iter_errors(value), None)
        if fault is None:
            return verdict(True)
        return verdict(False, None, f"{fault.json_path}: {fault.message}")

    def _validator(self, text: str) -> Any:
        """The validator of a schema. Raises ValueError if it is none."""
        if text not in self._validators:
            try:
                schema = parsed(text)
                kind = self._library.validators.validator_for(
                    schema, default=self._library.Draft202012Validator
                )
                kind.check_schema(schema)
            except self._library.SchemaError as error:
                raise ValueError(f"not a JSON schema: {error.message}") from None
            self._validators[text] = kind(schema, registry=self._registry)
        return self._validators[text]


def parsed(text: str, integer: Callable[[str], Any] = int) -> Any:
    """The value of JSON text. `integer`: makes integers of their digits. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_int=integer)
    except RecursionError:
        raise ValueError("arrays or objects are nested too deeply") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise invalid(f"the schema {file} can't be read: {reason}", "metric") from None


def _schema_of(row: Row) -> str:
    """The schema that the request asked for, as JSON text. Raises ValueError if there is none."""
    wanted = json.loads(row.get("response_format") or "{}")
    schema = (wanted.get("json_schema") or {}).get("schema") if isinstance(wanted, dict) else None
    if schema is None:
        raise ValueError("the request has no JSON schema in its response_format")
    return json.dumps(schema, sort_keys=True)
