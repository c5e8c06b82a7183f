"""Reads the text and JSON files of a model folder; errors name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jobs.errors import JobError
from worker.checkpoint.foreign import FIRST_BYTES, require_own


def present(path: Path) -> bool:
    """True if the file exists. Raises JobError("model_not_found") for a broken symbolic link, which
    must not pass for an optional file that is absent."""
    if path.is_symlink() and not path.exists():
        raise JobError(
            "model_not_found", f"{path} is a broken symbolic link: download the model again"
        )
    return path.is_file()


def read_text(path: Path) -> str:
    """A UTF-8 text file. Raises JobError("unsupported_model")."""
    try:
        raw = path.read_bytes()
        if raw:
            require_own(path, raw[:FIRST_BYTES])
        return raw.decode()
    except OSError as error:
        raise JobError("unsupported_model", f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise JobError(
            "unsupported_model", f"{path} is not UTF-8 text ({error}): download the model again"
        ) from None


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """The JSON object in `text`, the content of `path`. Raises JobError("unsupported_model")."""
    if not text:
        require_own(path, b"")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JobError(
            "unsupported_model", f"{path} is not JSON ({error}): download the model again"
        ) from None
    if not isinstance(data, dict):
        raise JobError(
            "unsupported_model", f"{path} must hold a JSON object: download the model again"
        )
    return data


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises JobError("unsupported_model")."""
    return parse_object(read_text(path), path)
