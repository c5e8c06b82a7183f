"""The model that ships with the package, and its held-out questions: where they lie.

Whoever resolves the model name `demo` reads `MODEL_DIR`; importing this loads nothing.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
DATASET: Path = Path(__file__).parent / "dataset.jsonl"

__all__ = ["DATASET", "MODEL_DIR"]
