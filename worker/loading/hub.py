"""Models from the Hugging Face Hub, downloaded in two steps: first the small files, which tell what
the model is and whether it can run here, then the weights.

The hub library reads HF_ENDPOINT, HF_HUB_CACHE, HF_HOME, HF_HUB_OFFLINE and HF_TOKEN, shows a
progress bar, resumes interrupted downloads, and skips files that are already complete.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)

from jobs.errors import JobError
from worker.loading.checkpoint import Headers, TensorHeader
from worker.loading.config import CONFIG, GGUF, NO_GGUF
from worker.loading.folder import FolderSource
from worker.loading.safetensors_files import (
    INDEX,
    SINGLE,
    SafetensorsHeaders,
    combine,
    read_header,
    weight_files,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

REPO_ID = re.compile(r"\w[\w.-]*/[\w.-]+(@[\w./-]+)?")
SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.*",
    "additional_chat_templates/*",
    INDEX,
]


class HubSource(FolderSource):
    """One commit of a hub repository: a folder in the download cache."""

    def __init__(
        self, folder: Path, reference: str, repo: str, revision: str, cache: Path | None
    ) -> None:
        super().__init__(folder, reference, repo, revision)
        self._cache = cache

    @classmethod
    def open(cls, reference: str, cache: Path | None) -> Self:
        """Download the small files of `org/name[@revision]`. Raises JobError("model_not_found")."""
        repo, _, revision = reference.partition("@")
        label = f"{repo} at revision {revision}" if revision else repo
        folder = _download(label, repo, revision or None, SMALL_FILES, cache)
        if not (folder / CONFIG).is_file():
            raise _no_config(label, repo, folder.name)
        return cls(folder, reference, repo, revision or folder.name, cache)

    @property
    def needs_download(self) -> bool:
        return not all((self.path / file).is_file() for file in weight_files(self.path))

    def headers(self) -> Headers:
        """Fetches the first bytes of each weight file that is not downloaded yet."""
        if not self.needs_download:
            return super().headers()
        if (self.path / INDEX).is_file():
            return SafetensorsHeaders(Path(self.reference), combine(self.path, self._header))
        return SafetensorsHeaders(Path(self.reference), self._header(SINGLE))

    def _header(self, file: str) -> dict[str, TensorHeader]:
        if (self.path / file).is_file():
            return read_header(self.path / file)
        fetch = partial(
            HfApi().parse_safetensors_file_metadata, self.name, file, revision=self.path.name
        )
        found = _reach(self.reference, fetch)
        headers = {}
        for name, tensor in found.tensors.items():
            begin, end = map(int, tensor.data_offsets)
            headers[name] = TensorHeader(Path(file), tensor.dtype, tuple(tensor.shape), begin, end)
        return headers

    def download_weights(self) -> None:
        """Download the weight files that are missing, from the commit of the small files."""
        names = [glob.escape(name) for name in weight_files(self.path)]
        _download(self.reference, self.name, self.path.name, names, self._cache)


def _download(
    label: str, repo: str, revision: str | None, patterns: list[str], cache: Path | None
) -> Path:
    """Download the matching files; returns the folder of their commit."""
    fetch = partial(
        snapshot_download, repo, revision=revision, allow_patterns=patterns, cache_dir=cache
    )
    return Path(_reach(label, fetch))


def _no_config(label: str, repo: str, commit: str) -> JobError:
    """The error for a repository without config.json, from the names of its files."""
    names = _reach(label, partial(HfApi().list_repo_files, repo, revision=commit))
    if any(name.lower().endswith(GGUF) for name in names):
        return JobError("unsupported_model", f"{label} has GGUF files and no {CONFIG}: {NO_GGUF}")
    return JobError(
        "model_not_found",
        f"{label} has no {CONFIG}: give a repository with a whole model in Hugging Face layout",
    )


def _reach(label: str, fetch: Callable[[], T]) -> T:
    """The result of a call of the hub library. Raises JobError("model_not_found")."""
    try:
        return fetch()
    except SafetensorsParsingError as error:
        reason = " ".join(str(error).split())
    except GatedRepoError:
        reason = "access is gated: accept its terms on the hub and set HF_TOKEN"
    except RevisionNotFoundError:
        reason = "the repository has no such revision"
    except RepositoryNotFoundError:
        reason = "no such repository on the hub (or it is private: set HF_TOKEN)"
    except LocalEntryNotFoundError:
        reason = "it is not in the local cache, and the hub cannot be reached"
    except EntryNotFoundError:
        reason = f"the repository lacks its weights: {SINGLE}, or the shards that {INDEX} names"
    except HFValidationError as error:
        reason = " ".join(str(error).split())
    except HfHubHTTPError as error:
        reason = f"the hub returned HTTP status {error.response.status_code}"
    except OSError as error:
        reason = f"{error.strerror or error}"
    except Exception as error:  # the library's HTTP client differs between its versions
        logger.debug("download interrupted", exc_info=error)
        fact = " ".join(str(error).split()) or type(error).__name__
        reason = f"the download was interrupted ({fact}): try again, complete files are kept"
    raise JobError("model_not_found", f"{label} cannot be downloaded: {reason}")
