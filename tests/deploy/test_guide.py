"""The commands of the guide: those of chatjobs are parsed, those that need neither root nor
Kubernetes are run, and the files that they name exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND
from tests.deploy.command_line import DEPLOY, ROOT, options_of
from tests.worker.site import Site

GUIDE = sorted((ROOT / "docs/operations").glob("*.md"))


def lines(page: Path) -> Iterator[str]:
    """The commands in the indented blocks."""
    for block in re.findall(r"(?<=\n\n)(?: {4,}.*\n)+", page.read_text("utf-8")):
        yield from (line.strip() for line in block.replace("\\\n", "").splitlines())


def ours(page: Path) -> Iterator[list[str]]:
    """The words behind `chatjobs`, also in a container or a unit."""
    for line in lines(page):
        found = re.match(r"(?:.* (?:exec worker|--) |(?:ExecStart=)?/opt/\S+/)?chatjobs (.+)", line)
        if found:
            yield shlex.split(found[1], comments=True)


COMMANDS = [(page.name, words) for page in GUIDE for words in ours(page)]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: str(value))
def test_chatjobs_takes_each_command_of_the_guide(page: str, words: list[str]) -> None:
    if words == ["--version"]:
        return
    words = [word.replace("${CHATJOBS_HTTP}", "9100") for word in words]
    options_of(words, {"/etc/chatjobs/%i.toml": DEPLOY / "worker.toml"})


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.name)
def test_the_files_that_the_guide_names_are_shipped(page: Path) -> None:
    named = set(re.findall(r"\bdeploy/[\w@./-]*\w", page.read_text("utf-8")))
    assert not [name for name in named if not (ROOT / name).exists()]


def test_each_shipped_file_is_named_in_the_documentation() -> None:
    pages = [
        *GUIDE,
        *(ROOT / "docs" / name for name in ("metrics.md", "operations.md", "upstream.md")),
    ]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    assert not [path.name for path in files if path.name not in text]


def test_the_commands_of_one_box_work_one_behind_the_other(site: Site, tmp_path: Path) -> None:
    site.worker(real=True, models=["demo"])
    site.wait_for_workers()
    outputs = []
    page = ROOT / "docs/operations/one-box.md"
    # The page says where the rows lie: not in the folder of the commands.
    (exported,) = (line for line in lines(page) if line.startswith("export "))
    name, _, folder = exported.removeprefix("export ").partition("=")
    assert folder == "/var/lib/chatjobs/results"  # %S/chatjobs/results of the unit
    (tmp_path / "elsewhere").mkdir()
    for words in ours(page):
        if words[0] == "work":  # of a unit
            continue
        done = subprocess.run(
            [COMMAND, *words],
            cwd=tmp_path / "elsewhere",
            env={**os.environ, "CHATJOBS_REDIS_URL": site.url, name: str(site.folder)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (words, done.stderr)
        outputs.append(done.stdout)
    assert any("42" in output for output in outputs)


def test_an_upgrade_installs_no_file_of_the_version_before() -> None:
    """pip leaves the folder `build` in the clone, and puts all that is there into the package."""
    commands = list(lines(ROOT / "docs/operations/upgrades.md"))
    (install,) = (n for n, line in enumerate(commands) if "pip install --upgrade" in line)
    assert "cd /srv/chatjobs-src" in commands and "sudo rm -rf build" in commands[:install]
