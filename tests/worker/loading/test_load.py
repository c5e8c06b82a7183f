"""Loading a model: the order of checks, downloads and reads, and what is reported of it."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jobs import JobError
from jobs.api.sampling import Sampling
from tests.worker.folders import WEIGHTS, loaded
from worker import Engine
from worker import device as devices
from worker.checkpoint.folder import FolderSource
from worker.checkpoint.headers import Checkpoint, Headers
from worker.device import Device
from worker.loading import load as loading
from worker.model_spec import ModelSpec

SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


class RemoteSource(FolderSource):
    """A folder whose weights must be downloaded first, like a hub model's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "org/tiny", "org/tiny")
        self.events: list[str] = []

    @property
    def needs_download(self) -> bool:
        return "download" not in self.events

    def download_weights(self) -> None:
        self.events.append("download")

    def headers(self) -> Headers:
        self.events.append("headers")
        return super().weights()

    def weights(self) -> Checkpoint:
        self.events.append("open")
        return super().weights()


@pytest.fixture
def remote(original: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteSource:
    source = RemoteSource(original)
    monkeypatch.setattr(loading, "find", lambda reference, download_dir: source)
    return source


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read whole, in order."""
    names: list[str] = []
    read_bytes = Path.read_bytes

    def recorded(path: Path) -> bytes:
        names.append(path.name)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", recorded)
    return names


def test_every_small_file_is_read_once(remote: RemoteSource, reads: list[str]) -> None:
    loaded("org/tiny")
    assert {name: reads.count(name) for name in SMALL_FILES} == dict.fromkeys(SMALL_FILES, 1)


def test_weights_are_downloaded_after_the_first_check_and_opened_once(
    remote: RemoteSource,
) -> None:
    assert loaded("org/tiny").info.family == "qwen3"
    assert remote.events == ["headers", "download", "open"]


def test_a_model_that_does_not_fit_is_not_downloaded(
    remote: RemoteSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "free_bytes", lambda _: 1000)
    with pytest.raises(JobError) as caught:
        loading.load(ModelSpec(reference="org/tiny", dtype="fp32"), Device(torch.device("cpu")))
    assert caught.value.code == "out_of_memory"
    assert remote.events == ["headers"]


def test_model_info_matches_the_files(original: Path) -> None:
    info = loaded(original).info
    tensors = load_file(original / WEIGHTS)
    assert (info.name, info.reference, info.revision) == ("tiny", str(original), None)
    assert info.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert (info.family, info.dtype, info.context_length) == ("qwen3", "float32", 512)


def test_a_model_for_which_memory_ends_is_refused_in_one_sentence(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError("Cannot allocate memory (os error 12)")

    monkeypatch.setattr("worker.checkpoint.weights.load", no_memory)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2000 << 20, resource.RLIM_INFINITY))
    with pytest.raises(JobError) as caught:
        Engine.load(str(original), device="cpu")
    assert caught.value.code == "out_of_memory"
    assert caught.value.message == (
        f"{original} can't be loaded: there is too little memory on cpu (Cannot allocate memory "
        "(os error 12)): use a smaller model or another dtype; `ulimit -v` gives each process 2000 "
        "MiB: raise it"
    )


def test_a_file_that_is_replaced_by_renaming_does_not_change_a_running_model(
    original: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(original, folder)
    prompt, greedy = [[3, 4, 5]], Sampling(temperature=0, max_tokens=8, ignore_eos=True)
    engine = Engine.load(str(folder), device="cpu", prefix_cache=False)
    before = engine.generate(prompt, greedy)[0].token_ids
    (folder / "new").write_bytes(b"")
    (folder / "new").rename(folder / WEIGHTS)
    assert engine.generate(prompt, greedy)[0].token_ids == before
