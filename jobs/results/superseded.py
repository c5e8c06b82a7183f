"""The note in a run that names the files which `compact` has replaced; readers skip these."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

NOTE = "_compacted.json"  # new file: the files that it replaces


def read_note(run_dir: Path) -> dict[str, list[str]]:
    """The names of the replaced files, by the name of the file that replaces them."""
    try:
        note: dict[str, list[str]] = json.loads((run_dir / NOTE).read_text("utf-8"))
    except FileNotFoundError:
        return {}
    return note


def without_superseded(files: Sequence[Path], run_dir: Path) -> list[Path]:
    """The files that count among those listed. Call it after listing: a note is written before its
    new file appears, so a listing with the new file never misses the note."""
    note = read_note(run_dir)
    names = {file.name for file in files}
    replaced = {old for new, olds in note.items() if new in names for old in olds}
    return [file for file in files if file.name not in replaced]
