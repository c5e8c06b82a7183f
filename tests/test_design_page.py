"""Documentation names only files and tests that exist; docs/design.md lists every module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
FOLDER = re.compile(r"    ((?:jobs|worker)/(?:\w+/)*)( .*)?")
MODULE = re.compile(r"      (\w+\.py) .*")
TOP = "jobs|worker|tests|bench|training|docs"
REFERENCE = re.compile(rf"\b((?:{TOP})/[\w/-]+\.\w+)(?:::(\w+))?")


def modules_on_the_page() -> set[str]:
    """Paths from the tree in docs/design.md."""
    folder, paths = "", set()
    for line in (ROOT / "docs" / "design.md").read_text(encoding="utf-8").splitlines():
        if found := FOLDER.fullmatch(line):
            folder = found[1]
        elif found := MODULE.fullmatch(line):
            paths.add(folder + found[1])
    return paths


def modules_in_the_tree() -> set[str]:
    """Paths of all modules of `jobs` and `worker`; packages' own files are left out."""
    return {
        path.relative_to(ROOT).as_posix()
        for package in ("jobs", "worker")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }


def test_the_design_page_lists_every_module() -> None:
    page, tree = modules_on_the_page(), modules_in_the_tree()
    assert sorted(page - tree) == [], "listed, but missing from the tree"
    assert sorted(tree - page) == [], "in the tree, but not listed"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_named_in_the_documentation_exist(page: Path) -> None:
    wrong = []
    for path, test in REFERENCE.findall(page.read_text(encoding="utf-8")):
        file = ROOT / path
        if not file.is_file():
            wrong.append(path)
        elif test and f"def {test}(" not in file.read_text(encoding="utf-8"):
            wrong.append(f"{path}::{test}")
    assert wrong == []


def test_every_guarantee_names_a_test() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.partition("\n## Guarantees\n")[2].partition("\n## ")[0]
    guarantees = re.findall(r"^- (?:.|\n(?!\n|- ))+", section, re.MULTILINE)
    assert guarantees
    assert [one for one in guarantees if "::test_" not in one] == []
