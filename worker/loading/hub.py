"""Models from the Hugging Face Hub, downloaded in two steps: first the small files, which tell what
the model is and whether it can run here, then the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Self

from huggingface_hub import HfApi

from jobs.errors import JobError
from worker.checkpoint.config import CONFIG
from worker.checkpoint.folder import FolderSource
from worker.checkpoint.foreign import ADAPTER, adapter, pickled, pickles_among
from worker.checkpoint.headers import Headers, TensorHeader
from worker.checkpoint.hub_files import (
    download,
    download_weights,
    list_files,
    missing_sizes,
    reach,
)
from worker.checkpoint.hub_hashes import is_unchecked
from worker.checkpoint.safetensors_files import (
    INDEX,
    SINGLE,
    SafetensorsHeaders,
    combine,
    read_header,
    weight_files,
)
from worker.gguf.read.files import models_among

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


def _require_weights(label: str, names: list[str]) -> None:
    """Raise JobError for a repository with an adapter or pickles in place of weights."""
    if ADAPTER in names:
        raise JobError("unsupported_model", f"{label} {adapter()}")
    if pickles := pickles_among(names):
        raise JobError("model_not_found", f"{label} has no {SINGLE}: {pickled(pickles)}")


class HubSource(FolderSource):
    """One commit of a hub repository: a folder in the download cache."""

    @classmethod
    def open(cls, reference: str, cache: Path | None) -> Self | None:
        """Download the small files of `org/name[@revision]`. None if the repository has no
        config.json, or none but GGUF weights. Raises JobError("model_not_found")."""
        repo, _, revision = reference.partition("@")
        label = f"{repo} at revision {revision}" if revision else repo
        folder = download(label, repo, revision or None, SMALL_FILES, cache)
        if not (folder / CONFIG).is_file():
            return None
        source = cls(folder, reference, repo, revision or folder.name)
        if not any((folder / file).is_file() for file in (INDEX, SINGLE)):
            names = list_files(label, repo, folder.name)
            if SINGLE not in names and models_among(names):
                return None
            if SINGLE not in names:
                _require_weights(label, names)
        return source

    @property
    def needs_download(self) -> bool:
        files = [self.path / file for file in weight_files(self.path)]
        return not all(file.is_file() for file in files) or is_unchecked(self.path, files)

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
        found = reach(self.reference, fetch)
        headers = {}
        for name, tensor in found.tensors.items():
            begin, end = map(int, tensor.data_offsets)
            headers[name] = TensorHeader(Path(file), tensor.dtype, tuple(tensor.shape), begin, end)
        return headers

    def download_sizes(self) -> Mapping[Path, int]:
        return missing_sizes(self.reference, self.name, self.path, weight_files(self.path))

    def download_weights(self) -> None:
        """Download the weight files that are missing, from the commit of the small files."""
        download_weights(self.reference, self.name, self.path, weight_files(self.path))
