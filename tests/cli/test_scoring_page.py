"""The commands in docs/scoring.md do what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.site import Site

PAGE = Path(__file__).parents[2] / "docs" / "scoring.md"
BIN = Path(sys.executable).parent


def blocks() -> list[str]:
    """The indented blocks of the page up to its reference of scores, in order."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Scores\n")[0]
    found = re.findall(r"(?<=\n\n)(?:    .*\n)+", text)
    return [re.sub("^    ", "", block, flags=re.MULTILINE) for block in found]


def is_output(block: str) -> bool:
    return re.match(r"[\w-]+: [\d,]+ in, ", block) is not None


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    site = Site(redis_url, tmp_path / "results")
    yield site
    site.close()


def test_its_commands_work_one_behind_the_other(site: Site, tmp_path: Path) -> None:
    site.worker(real=True, models=["demo"])
    variables = {**os.environ, "CHATJOBS_REDIS_URL": site.url}
    variables["PATH"] = f"{BIN}:{os.environ['PATH']}"
    outputs = []
    for block in blocks():
        if is_output(block):
            assert block.strip() in outputs[-1], outputs
            continue
        done = subprocess.run(
            ["bash", "-ec", block],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (block, done.stderr)
        outputs.append(done.stdout)
    assert len(outputs) >= 3
    assert "What is 17 + 25?" not in outputs[1] and "42" in outputs[1]
