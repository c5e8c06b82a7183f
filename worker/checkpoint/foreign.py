"""Identifies files and folders that hold no model, and says what to do about them.

Files are known by their first bytes: names tell little, and a failed download keeps the name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from stat import S_ISREG
from struct import unpack_from

from jobs.api.wire import describe
from jobs.errors import JobError
from worker.checkpoint.pieces import how_to_join, how_to_join_among

ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model"
GGUF = b"GGUF"
SAFETENSORS_SUFFIX = ".safetensors"
FIRST_BYTES = 512
MOST_LISTED = 8  # names in an error
PARTIAL = (".incomplete", ".part", ".partial", ".crdownload", ".download", ".aria2", ".tmp")
DOWNLOADS = Path(".cache/huggingface/download")  # where the hub's command keeps what is not whole
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
AGAIN = "download it again"
CONVERT = (
    "unpickling could run code, so it is not read: use a checkpoint in safetensors, or convert it "
    "with transformers' from_pretrained and save_pretrained"
)


def first_bytes(path: Path) -> bytes:
    """The beginning of a file. Raises JobError for what can't be read."""
    try:
        if not S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
            raise JobError("unsupported_model", f"{path} is not a regular file: give a GGUF file")
        with open(path, "rb") as file:
            return file.read(FIRST_BYTES)
    except OSError as error:
        raise JobError("unsupported_model", f"{path} cannot be read: {error.strerror}") from None


def is_gguf(path: Path) -> bool:
    try:
        return first_bytes(path).startswith(GGUF)
    except JobError:
        return False


def is_safetensors(start: bytes, size: int) -> bool:
    """True if a file of `size` bytes begins with the length of a JSON header and its first byte."""
    return len(start) > 8 and start[8:9] == b"{" and 2 <= unpack_from("<Q", start)[0] <= size - 8


def foreign(start: bytes) -> str | None:
    """The kind of a file that can't be part of a model, by its first bytes, with the remedy; None
    if it may be part of one."""
    head = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if not start:
        return "is empty: its download failed; download the model again"
    if start[8:9] == b"{":  # safetensors: the length of the header may look like anything
        return None
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        return (
            "is a git-lfs pointer, not the file itself: run 'git lfs pull' in its folder, or "
            f"{AGAIN}"
        )
    if head.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")):
        return (
            "is a web page, not the file itself (the page of the file, of a login or of an error): "
            f"{AGAIN}, from the link to the file (on the hub with /resolve/ in place of /blob/)"
        )
    # A safetensors file that is cut within its first nine bytes may begin like a pickle.
    is_cut_length = len(start) <= 8 and not start[2:].strip(b"\0")
    if not is_cut_length and start.startswith(
        (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
    ):
        return f"is a PyTorch pickle or a zip archive: {CONVERT}"
    if start.startswith((b"\x1f\x8b", b"7z\xbc\xaf", b"Rar!", b"\xfd7zXZ", b"(\xb5/\xfd")):
        return "is a compressed archive: unpack it, and give what is in it"
    return None


def require_own(path: Path, start: bytes) -> None:
    """Raise JobError for a file that is something else than its name says."""
    what = foreign(start)
    if what is not None:
        raise JobError("unsupported_model", f"{path} {what}")


def require_whole(path: Path) -> None:
    """Raise JobError for the file of a download that has not ended."""
    if path.suffix.lower() in PARTIAL:
        usual = (
            "is a part of a download that has not ended: download it again, and give the whole file"
        )
        raise JobError("model_not_found", f"{path} {how_to_join(path) or usual}")


def adapter(config: Path | None = None) -> str:
    """The error of a LoRA adapter, with the remedy and the base model that its configuration
    names."""
    base = None
    if config is not None:
        try:
            base = json.loads(config.read_text("utf-8"))["base_model_name_or_path"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            base = None
    of = f" of {describe(base)}" if isinstance(base, str) and base else ""
    return (
        f"holds a LoRA adapter{of}, not a model: merge it into its base model (peft's "
        "merge_and_unload, then save_pretrained), and give the merged model's folder"
    )


def pickles_among(names: Iterable[str]) -> list[str]:
    """Weights that PyTorch has pickled."""
    return [name for name in names if Path(name).suffix.lower() in PICKLES]


def pickled(names: Iterable[str]) -> str:
    """The error of a model whose weights are pickled, with the remedy."""
    return f"there are PyTorch pickles ({_listed(names)}): {CONVERT}"


def why_without(folder: Path, usual: str, *, weights: bool = False) -> str:
    """The likely reason for which a folder lacks a file of a model, or all its `weights`, with the
    remedy; `usual` if nothing points to one."""
    try:
        names = sorted(path.name for path in folder.iterdir())
        below = folder / DOWNLOADS
        partial = sorted(path.name for path in below.rglob("*") if path.suffix.lower() in PARTIAL)
    except OSError:
        return usual
    if join := how_to_join_among(names):
        return join
    partial = [name for name in names if Path(name).suffix.lower() in PARTIAL] + partial
    if partial:
        return f"its download has not ended ({_listed(partial)}): download the model again"
    if not names:
        return f"the folder is empty: {usual}"
    if "snapshots" in names:
        commits = sorted(path.name for path in (folder / "snapshots").glob("*"))
        return (
            f"it is a folder of the hub's cache: give {folder}/snapshots/{commits[0]}"
            if commits
            else usual
        )
    safetensors = [name for name in names if name.lower().endswith(SAFETENSORS_SUFFIX)]
    if weights and safetensors:
        return f"there are {_listed(safetensors)}, without an index: give the path of one of these"
    if weights and (pickles := pickles_among(names)):
        return pickled(pickles)
    return usual


def _listed(names: Iterable[str]) -> str:
    first = [*names]
    more = len(first) - MOST_LISTED
    return ", ".join(first[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
