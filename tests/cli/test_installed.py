"""The installed command: its version, completion in shells, and how much it imports for help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND

ROOT = Path(__file__).parents[2]


def test_the_version_is_that_of_the_distribution() -> None:
    printed = subprocess.check_output([COMMAND, "--version"], text=True)
    assert printed == f"chatjobs, version {version('chatjobs')}\n"


def test_the_changelog_and_the_images_have_the_version_of_the_project() -> None:
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## [{number}] - " in (ROOT / "CHANGELOG.md").read_text()
    images = re.findall(r"image: chatjobs\S*:(\S+)", (ROOT / "docker-compose.yml").read_text())
    assert images == [number, number]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_completion_script(shell: str) -> None:
    environment = {**os.environ, "_CHATJOBS_COMPLETE": f"{shell}_source"}
    script = subprocess.check_output([COMMAND], text=True, env=environment)
    assert f"_CHATJOBS_COMPLETE={shell}_complete" in script


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("chatjobs su", {"plain,submit"}),
        ("chatjobs models c", {"plain,check"}),
        ("chatjobs submit --pri", {"plain,--priority"}),
        ("chatjobs submit --priority ", {"plain,interactive", "plain,bulk"}),
    ],
)
def test_commands_options_and_values_are_completed(line: str, expected: set[str]) -> None:
    environment = {
        **os.environ,
        "_CHATJOBS_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    completed = subprocess.check_output([COMMAND], text=True, env=environment)
    assert set(completed.split()) == expected


@pytest.mark.parametrize("words", ["--help", "submit --help", "work --help", "--version"])
def test_help_imports_nothing_heavy(words: str) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['chatjobs', *{words.split()!r}]\n"
        "from jobs.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"pydantic", "redis", "rq", "rich", "pyarrow", "numpy", "torch", "jinja2", "asyncio"}
    assert "click" in done.stderr.split()
    assert not heavy & set(done.stderr.split())


def test_a_worker_imports_nothing_that_delays_its_start_or_its_first_answer() -> None:
    """torch imports sympy for some functions of tensors without data, and its compiler around each
    dispatch mode; pyarrow's data sets import pandas. A worker needs none of them, and the hub's
    library only for a model of the hub."""
    code = (
        "import sys\n"
        "import worker.service\n"
        "from jobs import Sampling\n"
        "from worker import Engine\n"
        "engine = Engine.load('demo', device='cpu')\n"
        "greedy = Sampling(temperature=0, max_tokens=8, ignore_eos=True)\n"
        "assert len(engine.generate([[5, 6, 7]], greedy)[0].token_ids) == 8\n"
        "engine.close()\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert {"torch", "pyarrow"} <= modules
    assert not {"sympy", "pandas", "huggingface_hub", "torch._dynamo"} & modules
