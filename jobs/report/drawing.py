"""Draws charts as SVG by vl-convert, in a child process: it contains a browser's engine, which ends
its process where memory is short.

The child is this file as a program. It reads a JSON array of Vega-Lite specifications, and writes
one of SVG texts.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from jobs.errors import JobError


@dataclass(frozen=True, eq=False, slots=True)
class Drawing:
    """A chart to be drawn. `specification`: of Vega-Lite. `label`: what a screen reader says."""

    specification: dict[str, Any]
    label: str


def draw(drawings: Sequence[Drawing]) -> dict[Drawing, str]:
    """The SVG of each drawing. Raises JobError if its process ends."""
    if not drawings:
        return {}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "jobs.report.drawing"],
        input=json.dumps([one.specification for one in drawings]),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        raise JobError(
            "unavailable",
            f"the charts can't be drawn: {_end(done)}; drawing takes 0.3 GB of memory and reserves "
            "70 GB of address space, so set no limit to that (ulimit -v unlimited), or give more "
            "memory",
        )
    return {
        one: svg.replace("<svg ", f'<svg role="img" aria-label="{escape(one.label)}" ', 1)
        for one, svg in zip(drawings, json.loads(done.stdout), strict=True)
    }


def _end(done: subprocess.CompletedProcess[str]) -> str:
    """Why the child has ended."""
    if done.returncode < 0:
        return f"their process ended by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "their process ended")


def main() -> None:
    """The child."""
    import vl_convert

    found = [vl_convert.vegalite_to_svg(one, allowed_base_urls=[]) for one in json.load(sys.stdin)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
