"""Conversations as files: JSON with the model's name, the system text and the turns."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jobs.api.conversation import Turn, check_turns, checked_system
from jobs.disk import part_of
from jobs.encoding import parse_written, to_json
from jobs.errors import JobError, invalid

FORMAT, VERSION = "chatjobs.conversation", 1


class Conversation(NamedTuple):
    """The content of a file. `model`: the one that answered last."""

    model: str
    system: str
    turns: list[Turn]


def write_conversation(path: str | Path, model: str, system: str, turns: Sequence[Turn]) -> None:
    """Write a file, which appears when it is complete and only its owner may read. Raises
    InvalidRequest if it can't be written."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "system": system,
        "turns": [json.loads(turn.to_json()) for turn in turns],
    }
    path = Path(path)
    part = part_of(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise invalid(f"{path} can't be written: it is no regular file", "path")
    try:
        part.touch(mode=0o600)
        part.write_text(to_json(content) + "\n", encoding="utf-8")
        part.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise invalid(f"{path} can't be written: {reason}", "path") from None
    finally:
        with suppress(OSError, ValueError):
            part.unlink()


def read_conversation(path: str | Path) -> Conversation:
    """Read a file. Raises InvalidRequest if it can't be read, or is of another kind."""
    if not os.path.isfile(path):  # False also for a name that no file can have
        raise invalid(f"{path}: there is no such file", "path")
    try:
        content, duplicate = parse_written(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _refused(path, error.strerror or "it can't be read") from None
    except (ValueError, RecursionError):
        raise _refused(path, "it is no JSON") from None
    if duplicate is not None:
        raise _refused(path, str(duplicate))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _refused(path, f"its format is not {FORMAT}")
    if content.get("version") != VERSION:
        raise _refused(
            path, f"its version is {content.get('version')!r}, and this is a reader of {VERSION}"
        )
    model, system, stored = content.get("model"), content.get("system"), content.get("turns")
    if not isinstance(model, str) or not isinstance(system, str) or not isinstance(stored, list):
        raise _refused(path, "it has no model, system or turns")
    try:
        checked_system(system)
        turns = [Turn.from_json(json.dumps(turn)) for turn in stored]
        check_turns(turns)
    except (ValueError, JobError) as error:
        raise _refused(path, str(error)) from None
    return Conversation(model, system, turns)


def _refused(path: str | Path, fact: str) -> JobError:
    return invalid(f"{path} is not a saved conversation: {fact}", "path")
