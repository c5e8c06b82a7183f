"""Finds the GGUF files of a model: the parts of a split file, and one of several files by the name
of its quantisation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from stat import S_ISREG

from jobs.errors import JobError
from jobs.sizes import counted
from worker.gguf.read.header import MAX_HEADER, Header, Incomplete, StoredTensor, parse
from worker.models.config_fields import Fields

SUFFIX = ".gguf"
SUFFIXES = (SUFFIX, ".bin", ".safetensors")  # of files with models; 3.2-1B ends with none
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.IGNORECASE)
# Files beside a model: vision towers, drafts for multi-token prediction, statistics for quantisers.
OTHER = re.compile(r"(^|[-._])(mmproj|mtp|imatrix)([-._]|$)", re.IGNORECASE)
COUNT, NUMBER, TOTAL = "split.count", "split.no", "split.tensors.count"
MAX_PARTS = 1000
# Read at first for the header: of a file on the network, and of a local one.
FIRST_BYTES, LOCAL_FIRST_BYTES = 1 << 20, 1 << 24


def stem_of(name: str) -> str:
    """The name of a model from a file's name: without its suffix and the number of a part."""
    path = PurePosixPath(name)
    stem = path.stem if path.suffix.lower() in SUFFIXES else path.name
    part = PART.fullmatch(stem)
    return part["stem"] if part else stem


def parts_of(name: str) -> list[str]:
    """The names of all parts of a split file; the name alone if it isn't split."""
    path = PurePosixPath(name)
    part = PART.fullmatch(path.stem)
    if part is None or not 1 <= int(part["count"]) <= MAX_PARTS:
        return [name]
    count = part["count"]
    return [
        str(path.with_name(f"{part['stem']}-{number:05d}-of-{count}{path.suffix}"))
        for number in range(1, int(count) + 1)
    ]


def models_among(names: Iterable[str]) -> dict[str, str]:
    """The models among the names of files: their names without part and suffix → the first part."""
    found: dict[str, str] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix.lower() == SUFFIX and not OTHER.search(path.stem):
            found.setdefault(str(path.with_name(stem_of(name))), name)
    return found


def pick(names: Iterable[str], wanted: str, label: str, remedy: str) -> str:
    """The file whose name ends with the quantisation `wanted`, in any case; the only file if none
    is wanted. Raises JobError("model_not_found") with the names of what is there, and `remedy`."""
    models = models_among(names)
    chosen = [stem for stem in models if not wanted or _ends_with(stem, wanted)]
    if len(chosen) == 1:
        return models[chosen[0]]
    if not models:
        raise JobError(
            "model_not_found", f"{label} has no GGUF file of a model: download the model again"
        )
    if not wanted:
        fact = f"{label} has several GGUF files"
    elif chosen:
        fact = f"several GGUF files of {label} match '{wanted}': {', '.join(chosen)}"
    else:
        fact = f"no GGUF file of {label} matches '{wanted}'"
    raise JobError("model_not_found", f"{fact}; there are: {', '.join(models)}. {remedy}")


def _ends_with(stem: str, wanted: str) -> bool:
    stem, wanted = stem.lower(), wanted.lower().removesuffix(SUFFIX)
    name = PurePosixPath(stem).name
    return name == wanted or name.endswith(("-" + wanted, "." + wanted, "_" + wanted))


def read_header(
    fetch: Callable[[int], bytes], size: int, path: Path, length: int = FIRST_BYTES
) -> Header:
    """The header of a file of `size` bytes. `fetch` returns as many of its first bytes as it is
    asked for: `length`, and more if these are not enough, up to MAX_HEADER. Raises JobError."""
    while True:
        try:
            return parse(fetch(min(length, size)), size, path)
        except Incomplete as incomplete:
            length = min(max(4 * length, incomplete.needed), MAX_HEADER)


def read_local_header(path: Path) -> Header:
    """The header of a local file. Raises JobError."""

    def fetch(length: int) -> bytes:
        with open(path, "rb") as file:
            return file.read(length)

    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            raise JobError("unsupported_model", f"{path} is not a regular file: give a GGUF file")
        return read_header(fetch, status.st_size, path, LOCAL_FIRST_BYTES)
    except FileNotFoundError:
        raise JobError(
            "model_not_found", f"{path} does not exist: download all parts of the model"
        ) from None
    except OSError as error:
        raise JobError("unsupported_model", f"{path} cannot be read: {error.strerror}") from None


def join(headers: Sequence[Header]) -> Header:
    """The header of a model from those of all its parts. Raises JobError."""
    first = headers[0]
    tensors: dict[str, StoredTensor] = {}
    for index, header in enumerate(headers):
        given = Fields(header.metadata, str(header.path))
        count, number = given.integer(COUNT, 1, minimum=0), given.integer(NUMBER, 0, minimum=0)
        if max(count, 1) != len(headers) or number != index:
            raise given.error(
                f"it is part {number + 1} of {count} by its metadata, and part {index + 1} of "
                f"{len(headers)} by its name: download all parts under their original names"
            )
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            raise given.error(f"tensor {min(twice)} is in another part, too; download it again")
        tensors.update(header.tensors)
    total = Fields(first.metadata, str(first.path)).integer(TOTAL, len(tensors), minimum=0)
    if total != len(tensors):
        raise JobError(
            "unsupported_model",
            f"{first.path} states {counted(total, 'tensor')}, and its parts hold {len(tensors)}; "
            "download the model again",
        )
    return Header(first.path, first.metadata, tensors)
