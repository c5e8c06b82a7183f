"""Files and figures that the README names. `tests/test_wheel.py` runs its Python blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.cli import build

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks() -> Iterator[tuple[str, str]]:
    """The Python blocks in order, each with the heading above it."""
    heading = ""
    for title, code in re.findall(r"^#+ ([^\n]*)$|^```python\n(.*?)^```", README, re.M | re.S):
        heading = title or heading
        if code:
            yield heading, code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_and_images_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", page.read_text())
    paths = [(link or attribute).partition("#")[0] for link, attribute in targets]
    missing = [
        path for path in paths if path and "://" not in path and not (page.parent / path).exists()
    ]
    assert not missing


def test_paths_in_the_readme_exist() -> None:
    """Files that are named in code spans, such as `constraints.txt`."""
    names = re.findall(r"(?<=[` ])[\w./-]+\.(?:py|txt|yml|md)\b", README)
    assert names
    assert not [name for name in names if not (ROOT / name).exists()]


def test_speed_figures_are_those_of_the_performance_page() -> None:
    (row,) = re.findall(r"^\| Speed .*$", README, re.M)
    figures = re.findall(r"\b\d\.\d\d\b", row)
    page = (ROOT / "docs/performance.md").read_text()
    assert figures
    assert not [figure for figure in figures if f"| {figure} |" not in page]


def test_the_commands_of_the_real_answer_work() -> None:
    """The package is one that `make real` tests; the demo stands for its file."""
    (installed,) = re.findall(r"^ +\.venv/bin/pip install --no-deps (\S+)$", README, re.M)
    requirements = (ROOT / "tests/real/requirements.txt").read_text()
    assert re.search(rf"^{installed}==", requirements, re.M)
    (command,) = re.findall(r"^ +\.venv/bin/chatjobs (.*\\\n.*)$", README, re.M)
    *words, option, file = shlex.split(command.replace("\\\n", ""))
    assert option == "-m"
    assert file == f".venv/lib/python3*/site-packages/{installed.replace('-', '_')}/*.gguf"
    done = CliRunner().invoke(build(), [*words, option, "demo"])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip()
