"""Contestants that are measured one after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.alone import Run, run_all
from bench.peers.process import PeerFailed

FIGURES = ("tokens/s", "peak RSS MiB")


def run(who: str, *found: float) -> Run:
    return Run({"contestant": who}, lambda: dict(zip(FIGURES, found, strict=True)))


def test_one_that_fails_has_a_cell_that_says_why_and_the_others_keep_their_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def hangs() -> dict[str, Any]:
        raise PeerFailed("did not end in 1800 s")

    out = tmp_path / "folder" / "traffic.json"
    run_all(
        "title", [run("a", 1, 2), Run({"contestant": "b"}, hangs), run("c", 3, 4)], FIGURES, out
    )
    rows = json.loads(out.read_text())["rows"]
    assert rows == [
        {"contestant": "a", "tokens/s": 1, "peak RSS MiB": 2, "failed": None},
        {
            "contestant": "b",
            "tokens/s": None,
            "peak RSS MiB": None,
            "failed": "did not end in 1800 s",
        },
        {"contestant": "c", "tokens/s": 3, "peak RSS MiB": 4, "failed": None},
    ]
    assert "did not end in 1800 s" in capsys.readouterr().out


def test_the_figures_of_each_are_written_when_it_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "traffic.json"

    def interrupted() -> dict[str, Any]:
        assert capsys.readouterr().err.splitlines()[-1] == "  b: started"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all("title", [run("a", 1, 2), Run({"contestant": "b"}, interrupted)], FIGURES, out)
    assert [row["contestant"] for row in json.loads(out.read_text())["rows"]] == ["a"]
