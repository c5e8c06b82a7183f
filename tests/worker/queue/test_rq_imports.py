"""RQ's internals stay in the files named for them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.worker.site import ROOT


def imported(file: Path) -> set[str]:
    """Top-level packages that a file imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [("worker", "worker/queue/rq_*.py"), ("jobs", "jobs/store/rq_*.py")],
)
def test_only_the_rq_files_import_rq(package: str, allowed: str) -> None:
    importers = {file for file in (ROOT / package).rglob("*.py") if "rq" in imported(file)}
    assert importers, "the search finds nothing"
    assert importers <= set(ROOT.glob(allowed))


def test_only_the_scripts_of_the_queue_spell_keys_of_rq() -> None:
    files = [*ROOT.glob("worker/**/*.py"), *ROOT.glob("worker/**/*.lua")]
    rights = ROOT / "worker/queue/rq_rights.py"  # it names patterns of keys, and reads none
    spelling = {file for file in files if re.search("[\"']rq:", file.read_text())}
    assert spelling, "the search finds nothing"
    assert spelling <= {*ROOT.glob("worker/queue/scripts/*.lua"), rights}
