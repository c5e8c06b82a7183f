"""Opens folders that tests wrote, the way a model is opened."""

from __future__ import annotations

from pathlib import Path

from worker.checkpoint.folder import FolderSource
from worker.checkpoint.tokenizer import Tokenizer


def open_folder(folder: Path) -> FolderSource:
    return FolderSource(folder, reference=str(folder), name="org/m")


def read_tokenizer(folder: Path) -> Tokenizer:
    return open_folder(folder).tokenizer
