"""The metrics that exist are those that the page and the command name."""

from __future__ import annotations

import re
from pathlib import Path

from jobs.cli.score import score
from jobs.scores.spec import KINDS

PAGE = Path(__file__).parents[3] / "docs" / "scoring.md"
OTHERS = {"pass@K", "module", "file.py"}  # before their colons


def test_the_page_and_the_command_name_each_metric() -> None:
    table = PAGE.read_text("utf-8").partition("| metric |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    codes = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    assert {code.partition(":")[0] for code in codes} == {*KINDS, *OTHERS}
    (option,) = [one for one in score.params if one.name == "metrics"]
    words = re.findall(r"[\w@+.-]+", str(getattr(option, "help", "")))
    assert {*KINDS, *OTHERS} <= set(words)
