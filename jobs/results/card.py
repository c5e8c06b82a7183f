"""README.md of a run: the data-set card with which load_dataset(<run>) finds samples and scores."""

from __future__ import annotations

from pathlib import Path

from jobs.results.unfinished import write_text

FILE = "README.md"

TEXT = """---
configs:
- config_name: samples
  default: true
  data_files: samples/*.parquet
- config_name: scores
  data_files: scores/*.parquet
---
# {run}

Chat completions written by chatjobs: one row per answer in `samples/`, the versions of the engine
and of torch in `run.json`. `chatjobs score` writes one row per answer and metric in `scores/`.
Files in both are always complete.

    from datasets import load_dataset
    rows = load_dataset("{run}", split="train")

    duckdb -c "select status, count(*) from '{run}/samples/*.parquet' group by 1"
"""


def write_card(run_dir: Path) -> None:
    """Replace the card atomically. Raises OSError."""
    write_text(run_dir, FILE, TEXT.format(run=run_dir.name))
