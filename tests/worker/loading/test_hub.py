"""Models from a fake hub."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hub import Hub
from tests.worker.checkpoints import make_checkpoint, split
from tests.worker.loading.hub_client import run_code
from worker.checkpoint.hub_files import NO_HUB
from worker.checkpoint.safetensors_files import SafetensorsCheckpoint

REPO, WEIGHTS = "org/tiny", "model.safetensors"
FIND = """
import json, sys, time
from jobs import JobError
from worker.loading.find import find
time.sleep = lambda seconds: None  # skip the delays between retries
{before}
try:
    source = find(sys.argv[0])
    source.download_weights()
    reply = dict(name=source.name, reference=source.reference, revision=source.revision,
                 folder=str(source.path))
except JobError as error:
    reply = dict(code=error.code, message=error.message)
print(json.dumps(reply))
"""

# The process ends before it has compared the weights.
KILLED = """
import os, sys
import worker.checkpoint.hub_hashes as hashes
from worker.loading.find import find
source = find(sys.argv[0])
hashes._is_intact = lambda *_: os._exit(9)
source.download_weights()
"""


@dataclass(frozen=True)
class Found:
    """A model that was found and downloaded."""

    name: str
    reference: str
    revision: str | None
    folder: Path


@dataclass
class Site:
    """A hub with one model, and an empty cache."""

    hub: Hub
    model: Path
    cache: Path
    commit: str

    def download(self, reference: str, before: str = "", **settings: str) -> dict[str, Any]:
        settings = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", **settings}
        code = FIND.format(before=before)
        done = run_code(code, [reference], self.hub, self.cache, **settings)
        assert done.returncode == 0, done.stderr
        reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return reply

    def find(self, reference: str = REPO, before: str = "", **settings: str) -> Found:
        reply = self.download(reference, before, **settings)
        assert "message" not in reply, reply
        return Found(**{**reply, "folder": Path(reply["folder"])})

    def refusal(self, reference: str = REPO, before: str = "", **settings: str) -> str:
        reply = self.download(reference, before, **settings)
        assert reply.get("code") == "model_not_found", reply
        assert "\n" not in reply["message"]
        return str(reply["message"])

    def assert_published(self, folder: Path) -> None:
        """Every file of the folder equals the published one."""
        for file in folder.rglob("*"):
            if file.is_file():
                assert file.read_bytes() == (self.model / file.relative_to(folder)).read_bytes()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("hub") / "tiny", num_hidden_layers=1)
    for name in ("README.md", "pytorch_model.bin", "tf_model.h5", "original/consolidated.pth"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not needed", encoding="utf-8")
    return folder


@pytest.fixture
def site(original: Path, tmp_path: Path) -> Iterator[Site]:
    model = Path(shutil.copytree(original, tmp_path / "published"))
    with Hub() as hub:
        commit = hub.publish(REPO, model)
        yield Site(hub, model, tmp_path / "cache", commit)


def test_only_the_needed_files_of_a_repository_are_downloaded(
    site: Site,
) -> None:
    files = site.find()
    assert (files.name, files.reference, files.revision) == (REPO, REPO, site.commit)
    site.assert_published(files.folder)
    assert {file.name for file in files.folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        WEIGHTS,
    }
    assert set(site.hub.fetched()) == {file.name for file in files.folder.iterdir()}


def test_a_cached_model_is_not_downloaded_again_and_works_offline(site: Site) -> None:
    first = site.find()
    site.hub.requests.clear()
    assert site.find() == first
    assert not site.hub.fetched()
    site.hub.requests.clear()
    assert site.find(HF_HUB_OFFLINE="1") == first
    assert site.find(HF_ENDPOINT="http://127.0.0.1:9") == first
    assert not site.hub.requests


def test_the_environment_sets_the_cache_folder(site: Site, tmp_path: Path) -> None:
    named, home = tmp_path / "named", tmp_path / "home"
    both = site.find(HF_HUB_CACHE=str(named), HF_HOME=str(home))
    assert both.folder.is_relative_to(named)
    assert site.find(HF_HOME=str(home)).folder.is_relative_to(home / "hub")
    user = site.find(HOME=str(tmp_path / "user"), HF_HOME="", XDG_CACHE_HOME="")
    assert user.folder.is_relative_to(tmp_path)


def test_a_revision_is_a_branch_a_tag_or_a_commit(site: Site, tmp_path: Path) -> None:
    other = Path(shutil.copytree(site.model, tmp_path / "other"))
    (other / "generation_config.json").write_text('{"top_k": 5}', encoding="utf-8")
    commit = site.hub.publish(REPO, other, "v2")
    by_name, by_commit = site.find(f"{REPO}@v2"), site.find(f"{REPO}@{commit}")
    assert (by_name.name, by_name.revision) == (REPO, "v2")
    assert by_name.folder == by_commit.folder
    assert "top_k" in (by_name.folder / "generation_config.json").read_text(encoding="utf-8")
    assert site.find().revision == site.commit


def test_a_repository_that_was_renamed_is_found(site: Site) -> None:
    site.hub.rename("org/old", REPO)
    assert site.find("org/old").name == "org/old"


def test_an_unknown_repository_is_named(site: Site) -> None:
    assert site.refusal("org/nothing") == (
        "org/nothing cannot be downloaded: no such repository on the hub (or it is private: set "
        "HF_TOKEN)"
    )


def test_an_unknown_revision_is_named(site: Site) -> None:
    assert site.refusal(f"{REPO}@v9") == (
        f"{REPO} at revision v9 cannot be downloaded: the repository has no such revision"
    )


def test_a_gated_repository_explains_how_to_get_access(site: Site) -> None:
    site.hub.gated.add(REPO)
    assert site.refusal() == (
        f"{REPO} cannot be downloaded: access is gated: accept its terms on the hub and set "
        "HF_TOKEN"
    )


@pytest.mark.parametrize(
    "settings", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}]
)
def test_a_missing_network_and_cache_are_reported(site: Site, settings: dict[str, str]) -> None:
    assert site.refusal(**settings) == (
        f"{REPO} cannot be downloaded: it is not in the local cache, and the hub cannot be reached"
    )


@pytest.mark.parametrize("reference", ["org/--", "org/x..y", "org/" + "x" * 200])
def test_an_invalid_repo_id_is_refused_without_a_request(site: Site, reference: str) -> None:
    assert site.refusal(reference).startswith(f"{reference} cannot be downloaded: ")
    assert not site.hub.requests


def test_an_interrupted_download_is_resumed(site: Site) -> None:
    half = (site.model / WEIGHTS).stat().st_size // 2
    site.hub.drop_after[WEIGHTS] = half
    # The library keeps whole chunks; its default chunk is larger than this model.
    chunks = "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 1024"
    site.assert_published(site.find(before=chunks).folder)
    assert site.hub.ranges(WEIGHTS) == [f"bytes={half - half % 1024}-"]


def test_a_failed_download_keeps_complete_files(site: Site) -> None:
    site.hub.broken_files[WEIGHTS] = 500
    assert site.refusal() == f"{REPO} cannot be downloaded: the hub returned HTTP status 500"
    before = site.hub.fetched()
    site.hub.broken_files.clear()
    site.assert_published(site.find().folder)
    assert site.hub.fetched() - before == {WEIGHTS: 1}


def test_a_partly_downloaded_model_is_not_treated_as_complete(site: Site) -> None:
    site.hub.broken_files[WEIGHTS] = 500
    site.refusal()
    assert site.refusal(HF_HUB_OFFLINE="1").startswith(f"{REPO} cannot be downloaded: ")


def test_a_hub_that_hangs_up_is_reported_in_one_sentence(site: Site) -> None:
    site.hub.silent_files.add(WEIGHTS)
    message = site.refusal()
    assert message.startswith(f"{REPO} cannot be downloaded: the download was interrupted (")
    assert message.endswith("): try again, complete files are kept")
    assert len([path for _, path, _ in site.hub.requests if path.endswith(WEIGHTS)]) > 1


def test_shards_are_downloaded_by_the_names_in_the_index(site: Site) -> None:
    """Qwen3.5's are named model.safetensors-00001-of-…; files that the index lacks are skipped."""
    split(site.model, 2)
    index = site.model / "model.safetensors.index.json"
    text = index.read_text(encoding="utf-8")
    for number, name in ((1, "model.safetensors-00001-of-00002.safetensors"), (2, "odd.sft")):
        old = f"model-{number:05d}-of-00002.safetensors"
        (site.model / old).rename(site.model / name)
        text = text.replace(old, name)
    index.write_text(text, encoding="utf-8")
    (site.model / "model-extra.safetensors").write_bytes(b"not needed")
    site.hub.publish(REPO, site.model)
    folder = site.find().folder
    site.assert_published(folder)
    names = {file.name for file in folder.iterdir()}
    assert {"model.safetensors-00001-of-00002.safetensors", "odd.sft"} <= names
    assert "model-extra.safetensors" not in names
    with SafetensorsCheckpoint(folder) as checkpoint:
        assert len(checkpoint.tensors) == len(json.loads(text)["weight_map"])


def test_a_full_disk_is_named(site: Site) -> None:
    """Simulated by a limit on file sizes."""
    size = (site.model / WEIGHTS).stat().st_size // 2
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
    assert site.refusal(before=limit) == f"{REPO} cannot be downloaded: File too large"
    site.assert_published(site.find().folder)


LOGIN = b"<html>Log in to the network</html>"


@pytest.mark.parametrize("path", ["/revision/main", WEIGHTS])
@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (401, b"{}", "the hub returned HTTP status 401: check HF_TOKEN"),
        (403, b"{}", "the hub returned HTTP status 403: HF_TOKEN has no access"),
        (429, b"{}", "the hub returned HTTP status 429, too many requests: wait, or set HF_TOKEN"),
        (503, b"{}", "the hub returned HTTP status 503"),
        (200, LOGIN, NO_HUB),
        (200, b"[]", NO_HUB),
    ],
)
def test_an_answer_that_is_no_file_is_named_and_no_missing_network(
    site: Site, path: str, status: int, body: bytes, reason: str
) -> None:
    site.hub.answers[path] = (status, body)
    assert site.refusal() == f"{REPO} cannot be downloaded: {reason}"
    site.hub.answers.clear()
    site.assert_published(site.find().folder)


def test_a_file_that_ends_too_soon_is_one_sentence_without_the_library_s_options(
    site: Site,
) -> None:
    size = (site.model / WEIGHTS).stat().st_size
    site.hub.short_files[WEIGHTS] = 1000
    message = site.refusal()
    assert f"should be of size {size} but has size 1000" in message
    assert message.endswith("; try again: complete files are kept")
    assert "force_download" not in message
    site.hub.short_files.clear()
    site.assert_published(site.find().folder)


def test_a_place_that_cannot_be_written_to_is_named(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    reason = site.refusal(HF_HUB_CACHE=str(file))
    assert reason.startswith(f"{REPO} cannot be downloaded: Not a directory: {file}")


@pytest.mark.parametrize("name", ["adapter_config.json", "pytorch_model.bin"])
@pytest.mark.parametrize("config", [True, False])
def test_a_repository_with_an_adapter_or_pickles_is_said_for_what_it_is(
    name: str, config: bool, site: Site, tmp_path: Path
) -> None:
    folder = shutil.copytree(site.model, tmp_path / "other")
    (folder / WEIGHTS).unlink()
    if not config:
        (folder / "config.json").unlink()
    (folder / name).write_text("{}")
    site.hub.publish("org/other", folder)
    message = site.download("org/other")["message"]
    if name == "adapter_config.json":
        assert "org/other holds a LoRA adapter, not a model: merge it into its base" in message
    elif config:
        assert f"org/other has no {WEIGHTS}: there are PyTorch pickles (" in message
        assert name in message
    else:
        assert "org/other has no config.json and no GGUF file of a model" in message


def test_a_hub_that_stalls_in_a_file_is_one_sentence(site: Site) -> None:
    site.hub.held[WEIGHTS] = threading.Event()
    message = site.refusal(HF_HUB_DOWNLOAD_TIMEOUT="1")
    site.hub.held[WEIGHTS].set()
    assert message.startswith(f"{REPO} cannot be downloaded: the download was interrupted (")
    assert message.endswith("): try again, complete files are kept")


def test_a_file_from_another_host_comes_without_the_token(site: Site) -> None:
    """As of LFS files, which the hub has at a content delivery network."""
    with Hub() as other:
        other.publish(REPO, site.model)
        site.hub.elsewhere = other.endpoint.replace("127.0.0.1", "localhost")
        site.assert_published(site.find(HF_TOKEN="hf_secret").folder)
        assert other.fetched()[WEIGHTS] == 1 and not site.hub.fetched()
        assert "Bearer hf_secret" in site.hub.logins and other.logins == {None}


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_file_with_wrong_bytes_is_refused_deleted_and_fetched_again(
    site: Site, name: str
) -> None:
    site.hub.wrong_files.add(name)
    message = site.refusal()
    assert f"cannot be downloaded: {name} came with other bytes than those of the hub" in message
    assert "was deleted: try again, other files are kept" in message
    assert not list(site.cache.rglob(f"snapshots/*/{name}"))
    before = site.hub.fetched()
    site.hub.wrong_files.clear()
    site.assert_published(site.find().folder)
    assert (site.hub.fetched() - before)[name] == 1
    names = {WEIGHTS, "config.json", "tokenizer.json"} & set(before)
    assert all(site.hub.fetched()[one] == 1 for one in names - {name})


def test_a_mirror_that_calls_small_files_by_a_plain_sha1_is_understood(site: Site) -> None:
    site.hub.plain_sha1 = True
    site.assert_published(site.find().folder)


def test_files_without_a_hash_are_not_compared(site: Site) -> None:
    site.hub.no_hashes = True
    site.hub.wrong_files.add(WEIGHTS)
    assert (site.find().folder / WEIGHTS).is_file()


def test_files_that_were_there_before_are_not_compared(site: Site) -> None:
    file = site.find().folder / WEIGHTS
    file.write_bytes(bytes(file.stat().st_size))
    site.hub.requests.clear()
    assert site.find().folder / WEIGHTS == file
    assert not site.hub.fetched()


def test_a_file_of_a_download_that_was_killed_is_compared_by_the_next(site: Site) -> None:
    """Also if all files are complete, and without a network."""
    site.hub.wrong_files.add(WEIGHTS)
    assert run_code(KILLED, [REPO], site.hub, site.cache).returncode == 9
    assert list(site.cache.rglob(f"snapshots/*/{WEIGHTS}"))
    find = "import sys; from worker.loading.find import find"
    needs = f"{find}; print(find(sys.argv[0]).needs_download)"
    asked = run_code(needs, [REPO], site.hub, site.cache, HF_HUB_OFFLINE="1")
    assert asked.stdout == "True\n", asked.stderr
    assert f"{WEIGHTS} came with other bytes" in site.refusal(HF_HUB_OFFLINE="1")
    site.hub.wrong_files.clear()
    site.assert_published(site.find().folder)
    asked = run_code(needs, [REPO], site.hub, site.cache, HF_HUB_OFFLINE="1")
    assert asked.stdout == "False\n", asked.stderr
