"""Calls of the hub library, whose errors become JobError("model_not_found").

The library reads HF_ENDPOINT, HF_HUB_CACHE, HF_HOME, HF_HUB_OFFLINE and HF_TOKEN, shows a progress
bar, resumes interrupted downloads, and skips files that are already complete. Those that it
downloads are compared with their hashes (hub_hashes.py).
"""

from __future__ import annotations

import errno
import glob
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)

from jobs.errors import JobError
from worker.checkpoint.hub_hashes import Unchecked, complete_in, delete_damaged
from worker.checkpoint.safetensors_files import INDEX, SINGLE

logger = logging.getLogger(__name__)

NOT_REACHED = "it is not in the local cache, and the hub cannot be reached"
NO_HUB = "the answer is not that of a hub: look at HF_ENDPOINT, and for a proxy or a login page"
RETRY_ADVICE = " This is usually"  # from here on the library names its own options
REMEDIES = {
    401: ": check HF_TOKEN",
    403: ": HF_TOKEN has no access",
    407: ": the proxy asks for a login",
    429: ", too many requests: wait, or set HF_TOKEN",
}

T = TypeVar("T")


def download(
    label: str, repo: str, revision: str | None, patterns: list[str], cache: Path | None
) -> Path:
    """Download the matching files, which are small; returns the folder of their commit."""
    repository = (cache or Path(constants.HF_HUB_CACHE)) / f"models--{repo.replace('/', '--')}"
    before = complete_in(repository)
    fetch = partial(
        snapshot_download, repo, revision=revision, allow_patterns=patterns, cache_dir=cache
    )
    folder = Path(reach(label, fetch))
    if came := complete_in(repository) - before:
        _refuse(label, reach(label, partial(delete_damaged, repository, came)))
    return folder


def download_weights(label: str, repo: str, folder: Path, names: Sequence[str]) -> None:
    """Download the named files of a commit. `folder`: that of the commit in the cache."""
    repository = folder.parent.parent
    fetch = partial(
        snapshot_download,
        repo,
        revision=folder.name,
        allow_patterns=[glob.escape(name) for name in names],
        cache_dir=repository.parent,
    )
    with reach(label, partial(Unchecked, repository)) as unchecked:
        try:
            reach(label, fetch)
        except JobError:
            _refuse(label, reach(label, unchecked.delete_damaged))  # what has come before
            raise
        _refuse(label, reach(label, unchecked.delete_damaged))


def _refuse(label: str, damaged: Sequence[str]) -> None:
    """Raise JobError if files that have come are damaged; they were deleted."""
    if damaged:
        raise JobError(
            "model_not_found",
            f"{label} cannot be downloaded: {', '.join(damaged)} came with other bytes than those "
            "of the hub (another hash) and was deleted: try again, other files are kept; if it "
            "comes again, look at HF_ENDPOINT, and for a proxy",
        )


def list_files(label: str, repo: str, commit: str) -> list[str]:
    """The names of all files of a commit."""
    return reach(label, partial(HfApi().list_repo_files, repo, revision=commit))


def missing_sizes(label: str, repo: str, folder: Path, names: Sequence[str]) -> dict[Path, int]:
    """The bytes of the named files that `folder`, that of a commit in the cache, lacks."""
    if all((folder / name).is_file() for name in names):
        return {}
    tree = partial(HfApi().list_repo_tree, repo, revision=folder.name, recursive=True)
    sizes = {one.path: getattr(one, "size", 0) for one in reach(label, lambda: list(tree()))}
    paths = {folder / name: sizes.get(name, 0) for name in names}
    return {path: size for path, size in paths.items() if not path.is_file()}


def reach(label: str, fetch: Callable[[], T]) -> T:
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
    except LocalEntryNotFoundError as error:  # the library says so of each answer but a few
        reason = _of_answer(error.__cause__) or NOT_REACHED
    except EntryNotFoundError:
        reason = f"the repository lacks its weights: {SINGLE}, or the shards that {INDEX} names"
    except HFValidationError as error:
        reason = " ".join(str(error).split())
    except (HfHubHTTPError, FileMetadataError) as error:
        reason = _of_answer(error)
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        fact = " ".join((error.strerror or str(error)).split())
        reason = f"{fact.partition(RETRY_ADVICE)[0]}{place}"
        if error.errno == errno.ENOSPC:
            reason += "; free some, and try again: complete files are kept"
        elif error.errno is None:  # a file that came is not the one that was announced
            reason += "; try again: complete files are kept"
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        logger.debug("an answer of the hub has another form", exc_info=error)
        reason = NO_HUB
    except Exception as error:  # the library's HTTP client differs between its versions
        logger.debug("download interrupted", exc_info=error)
        fact = " ".join(str(error).split()) or type(error).__name__
        reason = f"the download was interrupted ({fact}): try again, complete files are kept"
    raise JobError("model_not_found", f"{label} cannot be downloaded: {reason}")


def _of_answer(error: BaseException | None) -> str:
    """What is wrong with the answer of a server; "" if none has come."""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return f"the hub returned HTTP status {status}{REMEDIES.get(status, '')}"
    return NO_HUB if isinstance(error, FileMetadataError) else ""
