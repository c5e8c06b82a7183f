"""docs/operations/faults.md has each alert, each metric, and each warning and error of the log."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import yaml

from tests.deploy.command_line import DEPLOY, ROOT

PAGE = (ROOT / "docs/operations/faults.md").read_text("utf-8")
ALERTS, METRICS, LINES = (
    PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    for title in ("Alerts", "Metrics", "Log lines")
)
LOUD = {"warning", "error", "critical", "exception", "log"}
# Lines of other programs: Ray, `models quantize` and rq; and a text that an error has made.
OTHERS = ("worker/ray_data/", "worker/gguf/write/", "worker/tasks.py")
MADE = {"%s", "%s %s"}


def first_cells(table: str) -> list[list[str]]:
    """The code spans in the first cell of each row."""
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    return [re.findall(r"`([^`]+)`", cell) for cell in rows]


def entries(table: str) -> list[str]:
    return [one for cell in first_cells(table) for one in cell]


def logged() -> Iterator[str]:
    """The texts of warnings and errors, with `…` for what is filled in."""
    for path in sorted([*(ROOT / "jobs").rglob("*.py"), *(ROOT / "worker").rglob("*.py")]):
        if path.relative_to(ROOT).as_posix().startswith(OTHERS):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(ast.Name("logger" | "log"), level), args=args):
                    text = args[level == "log"] if level in LOUD else None
                    if isinstance(text, ast.Constant) and text.value not in MADE:
                        filled = re.sub(r"%(?:\.\d+)?[sdrfg]", "…", str(text.value))
                        yield filled.replace("%%", "%")


LOGGED = list(logged())


def pattern(entry: str) -> str:
    return re.escape(entry).replace("…", ".*")


def test_the_page_has_each_alert() -> None:
    file = yaml.safe_load((DEPLOY / "prometheus/chatjobs.rules.yml").read_text("utf-8"))
    (group,) = file["groups"]
    assert sorted(entries(ALERTS)) == sorted(rule["alert"] for rule in group["rules"])


def test_the_page_has_each_metric() -> None:
    documented = (ROOT / "docs/metrics.md").read_text("utf-8")
    assert entries(METRICS) == re.findall(r"^\| `(chatjobs_\w+)` ", documented, re.MULTILINE)


def test_the_page_has_each_warning_and_error_of_the_log() -> None:
    known = [pattern(entry) for entry in entries(LINES)]
    unknown = [text for text in LOGGED if not any(re.match(one, text) for one in known)]
    assert not unknown


@pytest.mark.parametrize("entry", entries(LINES))
def test_a_worker_or_a_recorder_logs_each_line_of_the_page(entry: str) -> None:
    assert any(re.match(pattern(entry), text) for text in LOGGED)
