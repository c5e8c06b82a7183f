"""RQ's internals stay in jobs/store."""

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
    [("worker", "worker/queue/rq_refusal.py"), ("jobs", "jobs/store/*.py")],
)
def test_only_the_store_imports_rq(package: str, allowed: str) -> None:
    importers = {file for file in (ROOT / package).rglob("*.py") if "rq" in imported(file)}
    assert importers, "the search finds nothing"
    assert importers <= set(ROOT.glob(allowed))


def test_workers_spell_no_keys_of_rq() -> None:
    def spelling(package: str) -> set[Path]:
        files = [*ROOT.glob(f"{package}/**/*.py"), *ROOT.glob(f"{package}/**/*.lua")]
        return {file for file in files if re.search("[\"']rq:", file.read_text())}

    assert spelling("jobs"), "the search finds nothing"
    assert spelling("worker") == set()
