"""The note in a run that names the files which `compact` has replaced; readers skip these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jobs.errors import InvalidRequest, invalid
from jobs.results.json_file import read_object, type_name

NOTE = "_compacted.json"  # new file: the files that it replaces


def read_note(run_dir: Path) -> dict[str, list[str]]:
    """The names of the replaced files, by the name of the file that replaces them. Raises
    InvalidRequest for a note that can't be used."""
    file = run_dir / NOTE
    found: dict[str, list[str]] = {}
    for new, olds in (read_object(file, _unusable) or {}).items():
        if not isinstance(olds, list):
            raise _unusable(f"{new} in {file} is {type_name(olds)}, not an array")
        for one in olds:
            if not isinstance(one, str):
                raise _unusable(f"an item of {new} in {file} is {type_name(one)}, not a string")
        found[new] = olds
    return found


def without_superseded(files: Sequence[Path], run_dir: Path) -> list[Path]:
    """The files that count among those listed. Call it after listing: a note is written before its
    new file appears, so a listing with the new file never misses the note."""
    note = read_note(run_dir)
    names = {file.name for file in files}
    replaced = {old for new, olds in note.items() if new in names for old in olds}
    return [file for file in files if file.name not in replaced]


def _unusable(fact: str) -> InvalidRequest:
    return invalid(
        f"{fact}: it names the files in samples/ that results compact has replaced; restore it, or "
        "remove it if none of these files is there (else their rows count twice)",
        "run",
    )
