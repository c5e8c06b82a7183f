"""Paths of the models that ship with the package (`demo` and its draft, `demo-draft`) and of the
held-out questions."""

from __future__ import annotations

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
DRAFT_DIR: Path = Path(__file__).parent / "draft"
DATASET: Path = Path(__file__).parent / "dataset.jsonl"

__all__ = ["DATASET", "DRAFT_DIR", "MODEL_DIR"]
