"""GGUF repositories on a local hub: described from range requests, then one file is downloaded."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from tests.hub import Hub
from tests.worker.gguf.converter import convert
from tests.worker.loading.hub_client import run_code, run_command

REPO = "org/tiny-GGUF"


class Site:
    """Repositories with GGUF files, and the command that reads them."""

    def __init__(self, hub: Hub, folder: Path, cache: Path) -> None:
        self.hub, self.folder, self._cache = hub, folder, cache

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_command(*words, hub=self.hub, home=self._cache)

    def check(self, reference: str) -> dict[str, Any]:
        words = ("models", "check", reference, "--device", "cpu", "--json")
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        facts: dict[str, Any] = json.loads(done.stdout)
        return facts

    def refusal(self, reference: str) -> str:
        done = self.run("models", "check", reference, "--device", "cpu")
        assert done.returncode == 3, done.stdout + done.stderr
        return done.stderr.strip().splitlines()[-1]

    def load(self, reference: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Loads the model in a process of its own and prints its name and revision."""
        code = (
            "import sys; from worker import Engine; "
            "e = Engine.load(sys.argv[0], device='cpu'); print(e.info.name, e.info.revision)"
        )
        return run_code(code, [reference], self.hub, self._cache, **settings)


@pytest.fixture
def site(checkpoint: Path, tmp_path: Path) -> Iterator[Site]:
    folder = tmp_path / "published"
    convert(checkpoint, folder / "tiny-F16.gguf", Type.F16)
    convert(checkpoint, folder / "Q8_0" / "tiny-Q8_0.gguf", Type.Q8_0, split=6)
    (folder / "mmproj-tiny-F16.gguf").write_bytes(b"a vision tower")
    with Hub() as hub:
        hub.publish(REPO, folder)
        yield Site(hub, folder, tmp_path / "cache")


def test_a_file_is_described_without_its_download(site: Site) -> None:
    facts = site.check(f"{REPO}:f16")
    assert (facts["model"], facts["family"], facts["downloaded"]) == (f"{REPO}:f16", "qwen3", False)
    assert facts["fits"] is True
    assert not site.hub.fetched()
    assert site.hub.ranges("tiny-F16.gguf")


def test_all_parts_of_the_picked_file_are_downloaded_and_no_other(site: Site) -> None:
    done = site.load(f"{REPO}:Q8_0@main")
    assert done.stdout.split() == [f"{REPO}:Q8_0", "main"], done.stderr
    parts = sorted(path.name for path in (site.folder / "Q8_0").iterdir())
    assert len(parts) > 1
    assert sorted(site.hub.fetched()) == [f"Q8_0/{part}" for part in parts]
    again = site.load(f"{REPO}:Q8_0@main", HF_HUB_OFFLINE="1")
    assert again.stdout == done.stdout, again.stderr


def test_a_part_with_wrong_bytes_is_refused_and_fetched_again(site: Site) -> None:
    part = sorted((site.folder / "Q8_0").iterdir())[-1].name
    site.hub.wrong_files.add(part)
    refused = site.run("models", "pull", f"{REPO}:Q8_0")
    assert refused.returncode == 3
    assert f"Q8_0/{part} came with other bytes than those of the hub" in refused.stderr
    site.hub.wrong_files.clear()
    before = site.hub.fetched()
    again = site.run("models", "pull", f"{REPO}:Q8_0")
    assert again.returncode == 0, again.stderr
    assert site.hub.fetched() - before == {f"Q8_0/{part}": 1}


def test_a_pick_that_is_not_clear_lists_the_files(site: Site) -> None:
    listed = f"there are: Q8_0/tiny-Q8_0, tiny-F16. Give one by the end of its name, as {REPO}:NAME"
    assert f"{REPO} has several GGUF files; {listed}" in site.refusal(REPO)
    assert f"no GGUF file of {REPO} matches 'Q4_K_M'; {listed}" in site.refusal(f"{REPO}:Q4_K_M")


def test_a_repository_with_one_file_needs_no_pick(site: Site) -> None:
    shutil.rmtree(site.folder / "Q8_0")
    site.hub.publish("org/one", site.folder)
    facts = site.check("org/one")
    assert facts["model"] == "org/one"


def test_a_config_beside_the_files_does_not_hide_them(site: Site, checkpoint: Path) -> None:
    shutil.copy(checkpoint / "config.json", site.folder)
    site.hub.publish("org/both", site.folder)
    assert "org/both has several GGUF files" in site.refusal("org/both")


def test_a_missing_part_on_the_hub_is_named(site: Site) -> None:
    part = sorted((site.folder / "Q8_0").iterdir())[1]
    part.unlink()
    site.hub.publish("org/lacking", site.folder)
    message = site.refusal("org/lacking:Q8_0")
    assert f"org/lacking lacks Q8_0/{part.name}, a part of the model" in message


def test_a_damaged_header_on_the_hub_is_refused(site: Site) -> None:
    path = site.folder / "tiny-F16.gguf"
    path.write_bytes(path.read_bytes()[:-200])
    site.hub.publish("org/damaged", site.folder)
    assert "it is truncated: tensor" in site.refusal("org/damaged:F16")
