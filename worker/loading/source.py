"""What a user calls a model → the folder that holds its files: first the small ones, which tell
what the model is and whether it can run here, then the weights.

A reference is `demo` (the model that comes with the package), a local folder, or a hub repo id
`org/name[@revision]`. The hub library honours HF_ENDPOINT, HF_HUB_CACHE, HF_HOME, HF_HUB_OFFLINE
and HF_TOKEN, shows a progress bar, goes on where a connection broke, and never fetches a file twice
that is whole.
"""

from __future__ import annotations

import glob
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jobs.errors import JobError
from worker.demo import MODEL_DIR
from worker.loading.checkpoint import weight_files

logger = logging.getLogger(__name__)

REPO_ID = re.compile(r"\w[\w.-]*/[\w.-]+(@[\w./-]+)?")
DESCRIPTION = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.*",
    "additional_chat_templates/*",
    "model.safetensors.index.json",
]


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder, and what it is called. `name` is what queues and requests use."""

    name: str
    reference: str
    revision: str | None
    folder: Path
    repo: str | None = None  # on the hub
    download_dir: Path | None = None


def find(reference: str, download_dir: Path | None = None) -> ModelFiles:
    """The files of a model but its weights, downloaded if need be.

    download_dir: the cache of downloads, in the hub library's layout; None is its default
    (HF_HUB_CACHE, else below HF_HOME). Raises JobError("model_not_found").
    """
    if reference == "demo":
        return ModelFiles("demo", reference, None, MODEL_DIR)
    path = Path(reference)
    try:
        path = path.expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError):  # too long a name, or nobody's home
        is_folder = exists = False
    if is_folder and reference:
        return ModelFiles(path.resolve().name, reference, None, path)
    if exists and reference:
        raise JobError("model_not_found", f"{reference} is a file: give the folder that it is in")
    if not REPO_ID.fullmatch(reference):
        raise JobError(
            "model_not_found",
            f"no folder '{reference}': give a model folder, a hub repo id such as Qwen/Qwen3-0.6B, "
            "or demo",
        )
    repo, _, revision = reference.partition("@")
    at = f"{repo} at revision {revision}" if revision else repo
    folder = _download(at, repo, revision or None, DESCRIPTION, download_dir)
    return ModelFiles(repo, reference, revision or folder.name, folder, repo, download_dir)


def fetch_weights(files: ModelFiles) -> None:
    """Download what of the weights isn't there yet, of the same commit as the rest.

    Raises JobError("model_not_found").
    """
    if files.repo is not None:
        names = [glob.escape(name) for name in weight_files(files.folder)]
        _download(files.reference, files.repo, files.folder.name, names, files.download_dir)


def _download(
    at: str, repo: str, revision: str | None, patterns: list[str], cache: Path | None
) -> Path:
    try:
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=patterns, cache_dir=cache)
        )
    except GatedRepoError:
        reason = "access is gated: accept its terms on the hub and set HF_TOKEN"
    except RevisionNotFoundError:
        reason = "the repository has no such revision"
    except RepositoryNotFoundError:
        reason = "no such repository on the hub (or it is private: set HF_TOKEN)"
    except LocalEntryNotFoundError:
        reason = "it is not in the local cache, and the hub can't be reached"
    except HFValidationError as error:
        reason = " ".join(str(error).split())
    except HfHubHTTPError as error:
        reason = f"the hub answered {error.response.status_code}"
    except OSError as error:
        reason = f"{error.strerror or error}"
    except Exception as error:  # of the library's HTTP client, which differs between its versions
        logger.debug("a download broke off", exc_info=error)
        fact = " ".join(str(error).split()) or type(error).__name__
        reason = f"the download broke off ({fact}): try again, what is complete is kept"
    raise JobError("model_not_found", f"{at} can't be had: {reason}")
