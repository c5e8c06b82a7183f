"""The examples of docs/testing.md and of the README's section on tests pass as a test file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def examples(page: str, heading: str = "") -> str:
    """The Python blocks of a page, or of one of its sections, as one file."""
    text = (ROOT / page).read_text().partition(heading)[2] if heading else (ROOT / page).read_text()
    section = text.partition("\n### ")[0] if heading else text
    return "\n".join(re.findall(r"^```python\n(.*?)^```", section, re.M | re.S))


@pytest.mark.parametrize(
    ("code", "tests"),
    [(examples("docs/testing.md"), 7), (examples("README.md", "\n### Unit tests\n"), 1)],
    ids=["docs/testing.md", "README.md"],
)
def test_the_examples_pass(code: str, tests: int, tmp_path: Path) -> None:
    file = tmp_path / "test_example.py"
    file.write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert f"{tests} passed" in done.stdout, done.stdout + done.stderr
