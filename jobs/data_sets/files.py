"""The files of a data set: one file, or those of one split in a folder of Hugging Face."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from jobs.errors import invalid

SUFFIXES = (".parquet", ".pq", ".jsonl", ".json", ".ndjson", ".csv", ".tsv")
COMPRESSED = (".gz", ".zst")
# JSON files that describe a data set.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
# Words for splits in the names of files and folders, and the split that each means.
SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
}
WORD = re.compile(r"[a-z]+")


def data_files(path: Path, split: str | None) -> list[Path]:
    """The files of a data set, in order. `split`: of a folder with several. Raises InvalidRequest,
    which names the choices, unless one split of one data set remains."""
    if not path.is_dir():
        if split is not None:
            raise invalid(f"--split selects files of a folder, and {path} is a file", "split")
        return [path]
    if (path / "dataset_dict.json").is_file():
        names = _described(path / "dataset_dict.json", "splits")
        return data_files(path / _choose(path, dict.fromkeys(map(str, names)), split), None)
    if (path / "state.json").is_file():
        files = _described(path / "state.json", "_data_files")
        return [path / str(one["filename"]) for one in files]
    found = sorted(file for file in path.rglob("*") if _is_data(file, path))
    if not found:
        raise invalid(
            f"{path} has no data: files of rows are named {', '.join(SUFFIXES)}, or these with "
            f"{' or '.join(COMPRESSED)}"
        )
    by_split: dict[str, list[Path]] = {}
    for file in found:
        by_split.setdefault(_split_of(file, path), []).append(file)
    if split is None and len(by_split) == 1:
        chosen = found
    else:
        chosen = by_split[_choose(path, by_split, split)]
    folders = sorted({str(file.parent.relative_to(path)) for file in chosen})
    if len(folders) > 1:
        raise invalid(
            f"{path} has data in several folders ({', '.join(folders)}): give one of them"
        )
    return chosen


def is_pipe(path: Path) -> bool:
    """True for a pipe or a socket, such as /dev/stdin may be: it can be read once."""
    return path.is_fifo() or path.is_socket()


@contextmanager
def readable_again(path: Path) -> Iterator[Path]:
    """A path that can be opened several times: of a pipe, that of a copy with the same name. The
    copy is on the disk until the context ends and nobody has it open, and it has no name there: a
    process that is killed leaves none."""
    if not is_pipe(path):
        yield path
        return
    with TemporaryFile() as copy:
        with path.open("rb") as source:
            shutil.copyfileobj(source, copy)
        copy.flush()
        with TemporaryDirectory(prefix="chatjobs-") as folder:
            link = Path(folder) / path.name
            link.symlink_to(f"/proc/self/fd/{copy.fileno()}")
            yield link


def _is_data(file: Path, root: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(root).parts)
    name = file.with_suffix("") if file.suffix in COMPRESSED else file
    return name.suffix in SUFFIXES and not hidden and file.name not in DESCRIPTIONS


def _split_of(file: Path, root: Path) -> str:
    """The split that the name of a file, or of a folder above it, says; "" if none does."""
    for part in reversed(file.relative_to(root).parts):
        for word in WORD.findall(part.lower()):
            if word in SPLITS:
                return SPLITS[word]
    return ""


def _choose(path: Path, names: dict[str, Any], split: str | None) -> str:
    known = ", ".join(name or "(none)" for name in names)
    if split is None:
        if len(names) == 1:
            return next(iter(names))
        raise invalid(f"{path} has several splits ({known}): choose one with --split", "split")
    wanted = split if split in names else SPLITS.get(split, split)
    if wanted not in names:
        raise invalid(f"{path} has no split {split!r}; it has: {known}", "split")
    return wanted


def _described(file: Path, name: str) -> list[Any]:
    try:
        found = json.loads(file.read_text("utf-8"))[name]
    except (ValueError, LookupError, TypeError):
        found = None
    if not isinstance(found, list):
        raise invalid(f"{file} does not describe a data set: it has no {name!r}")
    return found
