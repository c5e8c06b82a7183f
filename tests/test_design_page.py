"""Documentation names only files, folders and tests that exist; guarantees name tests."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TOP = "jobs|worker|tests|bench|training|docs"
REFERENCE = re.compile(rf"\b((?:{TOP})/[\w/-]+\.\w+)(?:::(\w+))?")
FOLDER = re.compile(rf"`((?:{TOP})/(?:[\w-]+/)*)`")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_folders_named_in_the_documentation_exist(page: Path) -> None:
    named = FOLDER.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).is_dir()] == []


def test_every_page_is_in_an_index() -> None:
    """The README names the pages of docs/, docs/decisions/README.md those beside it."""
    for index, folder in (
        (ROOT / "README.md", DOCS),
        (DOCS / "decisions" / "README.md", DOCS / "decisions"),
    ):
        links = set(re.findall(r"\]\(([\w./-]+)", index.read_text(encoding="utf-8")))
        linked = {(index.parent / link).resolve() for link in links}
        assert [page.name for page in folder.glob("*.md") if page not in {*linked, index}] == []


def test_every_guarantee_names_a_test() -> None:
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    section = page.partition("\n## Guarantees\n")[2].partition("\n## ")[0]
    guarantees = re.findall(r"^- (?:.|\n(?!\n|- ))+", section, re.MULTILINE)
    assert guarantees
    assert [one for one in guarantees if "::test_" not in one] == []


def test_the_layers_are_those_of_the_contracts() -> None:
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in project["tool"]["importlinter"]["contracts"]:
        if (name := contract["name"].partition(": layers")[0]) in ("jobs", "worker"):
            shown = re.search(rf"^`{name}`:\n\n((?: {{4}}.+\n)+)", page, re.MULTILINE)
            assert shown, f"the page does not show the layers of {name}"
            assert [line.strip() for line in shown[1].splitlines()] == contract["layers"]
