"""Reads the JSON files of a run, which another program or a damaged disk may have changed."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.encoding import from_json
from jobs.errors import InvalidRequest

TYPE_NAMES = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
}


def read_object(file: Path, unusable: Callable[[str], InvalidRequest]) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is none. `unusable`: the error of a fact about the
    file, which is raised if it can't be read."""
    try:
        is_file = stat.S_ISREG(file.stat().st_mode)
        text = file.read_bytes() if is_file else b""  # a pipe would wait for a writer
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable(f"{file} can't be read ({error.strerror})") from None
    if not is_file:
        raise unusable(f"{file} is no regular file")
    try:
        content = from_json(text)
    except (ValueError, RecursionError):
        raise unusable(f"{file} is not JSON") from None
    if not isinstance(content, dict):
        raise unusable(f"{file} is {type_name(content)}, not an object")
    return content


def type_name(value: Any) -> str:
    """The type of a value of JSON, for an error."""
    return TYPE_NAMES.get(type(value), "null")
