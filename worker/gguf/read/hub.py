"""GGUF files on the Hugging Face Hub: `org/name[:QUANTISATION][@revision]`.

The headers are fetched with range requests, so that a model is described and checked before it is
downloaded. Only the chosen file is downloaded, with all parts of a split one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Self

from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from jobs.errors import JobError
from worker.checkpoint.config import CONFIG
from worker.checkpoint.foreign import ADAPTER, adapter
from worker.checkpoint.hub_files import (
    download,
    download_weights,
    list_files,
    missing_sizes,
    reach,
)
from worker.checkpoint.hub_hashes import is_unchecked
from worker.gguf.read.files import (
    join,
    models_among,
    parts_of,
    pick,
    read_header,
    read_local_header,
)
from worker.gguf.read.header import Header, StoredTensor
from worker.gguf.read.source import TEMPLATE_FILE, TOKENIZER, GgufSource

TIMEOUT = 30.0  # seconds until the hub must have begun to send


class GgufHubSource(GgufSource):
    """One file of one commit of a repository. `folder` is that of the commit in the cache."""

    def __init__(
        self,
        folder: Path,
        files: list[str],
        reference: str,
        repo: str,
        name: str,
        revision: str,
    ) -> None:
        super().__init__([folder / file for file in files], reference, name, revision)
        self._folder, self._files, self._repo = folder, files, repo

    @classmethod
    def open(cls, reference: str, cache: Path | None) -> Self:
        """Finds the file, and downloads the tokenizer.json and the chat_template.jinja beside it.
        Raises JobError("model_not_found")."""
        name, _, revision = reference.partition("@")
        repo, _, wanted = name.partition(":")
        folder = download(reference, repo, revision or None, [TOKENIZER, TEMPLATE_FILE], cache)
        try:
            names = list_files(reference, repo, folder.name)
        except JobError:  # offline: what was downloaded before
            names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
            if not names:
                raise
        if not models_among(names) and ADAPTER in names:
            raise JobError("unsupported_model", f"{reference} {adapter()}")
        if not models_among(names):
            raise JobError(
                "model_not_found",
                f"{reference} has no {CONFIG} and no GGUF file of a model: give a repository with "
                "a whole model",
            )
        remedy = f"Give one by the end of its name, as {repo}:NAME"
        files = parts_of(pick(names, wanted, repo, remedy))
        missing = set(files) - set(names)
        if missing:
            raise JobError("model_not_found", f"{repo} lacks {min(missing)}, a part of the model")
        return cls(folder, files, reference, repo, name, revision or folder.name)

    @property
    def needs_download(self) -> bool:
        there = all(part.is_file() for part in self.parts)
        return not there or is_unchecked(self._folder, self.parts)

    def download_sizes(self) -> Mapping[Path, int]:
        return missing_sizes(self.reference, self._repo, self._folder, self._files)

    def download_weights(self) -> None:
        """Download the parts that are missing, from the commit that was described."""
        download_weights(self.reference, self._repo, self._folder, self._files)

    @cached_property
    def _header(self) -> Header:
        files = zip(self.parts, self._files, strict=True)
        return join(
            [
                read_local_header(part) if part.is_file() else self._fetch_header(part, file)
                for part, file in files
            ]
        )

    def _fetch_header(self, part: Path, file: str) -> Header:
        size = self._fetch(file, 0, 1)[1]
        fetched = b""

        def first(length: int) -> bytes:
            nonlocal fetched
            if length > len(fetched):
                fetched += self._fetch(file, len(fetched), length)[0]
            return fetched

        return read_header(first, size, part)

    def _bytes_of(self, stored: StoredTensor) -> bytes:
        if stored.file.is_file():
            return super()._bytes_of(stored)
        file = self._files[self.parts.index(stored.file)]
        return self._fetch(file, stored.begin, stored.end)[0]

    def _fetch(self, file: str, begin: int, end: int) -> tuple[bytes, int]:
        """Bytes of a file that is not downloaded, and its size."""

        def get() -> tuple[bytes, int]:
            url = hf_hub_url(self._repo, file, revision=self._folder.name)
            headers = {**build_hf_headers(), "range": f"bytes={begin}-{end - 1}"}
            response = get_session().get(url, headers=headers, timeout=TIMEOUT)
            hf_raise_for_status(response)
            total = response.headers.get("content-range", "").rpartition("/")[2]
            if response.status_code != 206 or not total.isdigit():
                raise OSError("the hub doesn't send parts of files")
            return response.content, int(total)

        return reach(self.reference, get)
