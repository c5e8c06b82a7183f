"""Measures contestants one after the other, each alone on the machine. The figures of each are
written when it has ended, so that one that fails or hangs leaves those of the others."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import report, write
from bench.peers.process import PeerFailed

LIMIT_SECONDS = 1800  # of one measurement, with the start of the contestant

Row = dict[str, Any]


class Run(NamedTuple):
    """A measurement of one contestant."""

    names: Row  # columns that tell rows apart, such as format and contestant
    measure: Callable[[], Row]  # returns the figures; raises PeerFailed


def run_all(title: str, runs: Iterable[Run], figures: Sequence[str], out: Path | None) -> None:
    """Measure and report. The column `failed` says why a contestant has no `figures`."""
    rows: list[Row] = []
    for names, measure in runs:
        label = ": ".join(str(name) for name in names.values())
        print(f"  {label}: started", file=sys.stderr)
        begin = time.monotonic()
        try:
            row: Row = {**measure(), "failed": None}
        except PeerFailed as error:
            row = {**dict.fromkeys(figures), "failed": str(error)}
        found = row["failed"] or {name: row[name] for name in figures}
        print(f"  {label}: {found}, {time.monotonic() - begin:.0f} s in all", file=sys.stderr)
        rows.append({**names, **row})
        if out is not None:
            write(title, rows, "cpu", out)
    report(title, rows, "cpu", out)
