"""Finds a model by its reference: `demo`, a local folder or GGUF file, or a hub repo id
(`org/name[:quantisation][@revision]`)."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from jobs.errors import JobError
from worker.checkpoint.config import CONFIG
from worker.checkpoint.files import present
from worker.checkpoint.folder import FolderSource
from worker.checkpoint.foreign import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    GGUF,
    SAFETENSORS_SUFFIX,
    adapter,
    first_bytes,
    is_gguf,
    is_safetensors,
    require_own,
    require_whole,
)
from worker.checkpoint.pieces import how_to_join
from worker.checkpoint.safetensors_files import INDEX, SINGLE, weight_files
from worker.checkpoint.source import ModelSource
from worker.demo import DRAFT_DIR, MODEL_DIR
from worker.gguf.read.files import SUFFIX, parts_of, pick, stem_of
from worker.gguf.read.source import GgufSource

logger = logging.getLogger(__name__)

# org/name[:quantisation][@revision]
REPO_ID = re.compile(r"\w[\w.-]*/[\w.-]+(?P<quantisation>:[\w.-]+)?(@[\w./-]+)?")


def find(reference: str, download_dir: Path | None = None) -> ModelSource:
    """Open a model. Of a hub repository, everything but the weights is downloaded if needed.

    download_dir: the download cache, in the hub library's layout; None is that library's default
    (HF_HUB_CACHE, else below HF_HOME). Raises JobError("model_not_found").
    """
    if reference == "demo":
        return FolderSource(MODEL_DIR, reference, "demo")
    if reference == "demo-draft":
        return FolderSource(DRAFT_DIR, reference, "demo-draft")
    path = Path(reference)
    try:
        path = path.expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError):  # a name that is too long, or the home of an unknown user
        is_folder = exists = False
    if is_folder and reference:
        return _in_folder(path, reference)
    if exists and reference:
        return _in_file(path, reference)
    repo = REPO_ID.fullmatch(reference)
    name, _, kind = reference.partition(":")
    if name == "demo" and kind:
        raise JobError(
            "model_not_found",
            f"{reference!r} is for chatjobs demo alone; chatjobs models quantize demo --type "
            f"{kind} writes it to a file: give that",
        )
    if repo is None:
        what = "file" if reference.lower().endswith(SUFFIX) else "folder"
        raise JobError(
            "model_not_found",
            f"no {what} '{reference}': give a model folder, a GGUF file, a hub repo id such as "
            "Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B-GGUF:Q8_0, or demo",
        )
    # The hub library takes long to import, and local models don't need it.
    from worker.gguf.read.hub import GgufHubSource
    from worker.loading.hub import HubSource

    source = None if repo["quantisation"] else HubSource.open(reference, download_dir)
    return source or GgufHubSource.open(reference, download_dir)


def _in_folder(path: Path, reference: str) -> ModelSource:
    """The model in a folder: safetensors files, else its GGUF file."""
    name = path.resolve().name
    try:
        files = {file.name for file in path.iterdir()}
    except OSError as error:
        raise JobError("model_not_found", f"{path} cannot be read: {error.strerror}") from None
    if {SINGLE, INDEX} & files:
        if ADAPTER in files:
            logger.warning(
                "%s: the LoRA adapter beside the model (%s) is not applied: merge it into it",
                reference,
                ADAPTER,
            )
        return FolderSource(path, reference, name)
    found = {file: file for file in files if file.lower().endswith(SUFFIX)}
    if not found:
        if ADAPTER in files:
            raise JobError("unsupported_model", f"{path} {adapter(path / ADAPTER)}")
        # Under any name: `pick` knows files by their suffix.
        found = {f"{file}{SUFFIX}": file for file in files if is_gguf(path / file)}
    if not found:
        weights = [file for file in files if file.lower().endswith(SAFETENSORS_SUFFIX)]
        single = weights[0] if len(weights) == 1 else SINGLE
        return FolderSource(path, reference, name, single=single)
    chosen = found[pick(found, "", f"folder {reference}", "Give the path of one of these files")]
    return GgufSource([path / part for part in parts_of(chosen)], reference, name)


def _in_file(path: Path, reference: str) -> ModelSource:
    """The model in a file, known by its first bytes: GGUF, or the weights of the folder around."""
    require_whole(path)
    start = first_bytes(path)
    if path.suffix.lower() == SUFFIX or start.startswith(GGUF):
        parts = [path.with_name(name) for name in parts_of(path.name)]
        return GgufSource(parts, reference, stem_of(path.name))
    folder = path.parent
    named = path.suffix.lower() == SAFETENSORS_SUFFIX
    if named or is_safetensors(start, path.stat().st_size):
        require_own(path, start)
        if path.name == SINGLE or path.name in weight_files(folder):
            return FolderSource(folder, reference, folder.resolve().name)
        if path.stem == ADAPTER_WEIGHTS and present(folder / ADAPTER):
            raise JobError("unsupported_model", f"{path} {adapter(folder / ADAPTER)}")
        if not present(folder / CONFIG):
            raise JobError(
                "model_not_found",
                f"{path} holds weights alone: put the model's {CONFIG} and tokenizer.json beside "
                "it",
            )
        return FolderSource(folder, reference, stem_of(path.name), single=path.name)
    require_own(path, start)
    usual = (
        "is a file, and neither GGUF nor safetensors: give a file of these formats, or the folder "
        "of a model"
    )
    raise JobError("model_not_found", f"{reference} {how_to_join(path) or usual}")
