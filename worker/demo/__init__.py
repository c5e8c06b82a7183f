"""Paths of the model that ships with the package (`demo`) and of its held-out questions."""

from __future__ import annotations

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
DATASET: Path = Path(__file__).parent / "dataset.jsonl"

__all__ = ["DATASET", "MODEL_DIR"]
