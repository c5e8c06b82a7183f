"""Repositories that can't run are refused from the headers of their weights, fetched with a range
request; nothing large is downloaded."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hub import Hub
from tests.worker.checkpoints import make_checkpoint, split
from tests.worker.folders import WEIGHTS, edit_json, edit_weights
from tests.worker.loading.hub_client import run_command

REPO, HEAD = "org/tiny", "bytes=0-100000"
Q_PROJ = "model.layers.0.self_attn.q_proj"


class Check:
    """`chatjobs models check org/tiny` against a local hub."""

    def __init__(self, hub: Hub, folder: Path, cache: Path) -> None:
        self.hub, self.folder, self._cache = hub, folder, cache

    def run(self) -> subprocess.CompletedProcess[str]:
        self.hub.publish(REPO, self.folder)
        words = ("models", "check", REPO, "--device", "cpu")
        return run_command(*words, hub=self.hub, home=self._cache)

    def refusal(self) -> str:
        done = self.run()
        assert done.returncode == 3, done.stdout + done.stderr
        assert not any(name.endswith(".safetensors") for name in self.hub.fetched())
        message = done.stderr.strip().splitlines()[-1]
        return message.removeprefix("error: ").removeprefix("unsupported_model: ")

    def edit(self, change: Callable[[dict[str, Tensor]], Any]) -> None:
        edit_weights(self.folder, change)


@pytest.fixture
def check(original: Path, tmp_path: Path) -> Iterator[Check]:
    folder = Path(shutil.copytree(original, tmp_path / "published"))
    with Hub() as hub:
        yield Check(hub, folder, tmp_path / "cache")


def fp8(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q_PROJ}.weight"] = tensors[f"{Q_PROJ}.weight"].to(torch.float8_e4m3fn)
    tensors[f"{Q_PROJ}.weight_scale_inv"] = torch.ones(1, 1)


def nvfp4(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q_PROJ}.weight"] = torch.zeros(64, 16, dtype=torch.uint8)
    tensors[f"{Q_PROJ}.weight_scale"] = torch.ones(64, 2).to(torch.float8_e4m3fn)
    tensors[f"{Q_PROJ}.weight_scale_2"] = torch.ones(())


def mlx(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q_PROJ}.weight"] = torch.zeros(64, 4, dtype=torch.uint32)
    tensors[f"{Q_PROJ}.scales"], tensors[f"{Q_PROJ}.biases"] = torch.ones(64, 1), torch.ones(64, 1)


@pytest.mark.parametrize(
    ("quantise", "kinds"),
    [(fp8, "1 of its 15 tensors as F8_E4M3"), (nvfp4, "F8_E4M3, U8"), (mlx, "U32")],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_quantised_weights_without_a_config_are_refused(
    check: Check, quantise: Callable[[dict[str, Tensor]], None], kinds: str, shards: int
) -> None:
    edit_weights(check.folder, quantise)
    if shards > 1:
        split(check.folder, shards)
    message = check.refusal()
    assert message.startswith(f"{REPO} stores ")
    assert kinds in message
    assert message.endswith("use the unquantised checkpoint (unsupported_model)")
    reads = [wanted for _, path, wanted in check.hub.requests if ".safetensors" in path and wanted]
    assert reads == [HEAD] * shards


def test_a_shape_that_the_config_does_not_give_is_refused(check: Check) -> None:
    edit_json(check.folder / "config.json", lambda config: config.update(intermediate_size=40))
    assert f"{REPO}: tensor model.layers.0.mlp." in check.refusal()


def test_a_model_that_passes_is_described(check: Check) -> None:
    split(check.folder, 2)
    done = check.run()
    assert done.returncode == 0, done.stderr
    assert "not downloaded yet" in done.stdout
    assert not any(name.endswith(".safetensors") for name in check.hub.fetched())


def test_a_repository_without_weights_is_named(check: Check) -> None:
    (check.folder / WEIGHTS).unlink()
    assert f"the repository lacks its weights: {WEIGHTS}" in check.refusal()


def test_a_header_that_is_broken_is_named(check: Check) -> None:
    (check.folder / WEIGHTS).write_bytes(b"\xff" * 64)
    assert f"{REPO} cannot be downloaded: " in check.refusal()


def test_a_repository_without_a_config_is_named(check: Check) -> None:
    (check.folder / "config.json").unlink()
    assert (
        f"{REPO} has no config.json and no GGUF file of a model: give a repository"
        in check.refusal()
    )


# --- text models in the wrappers of other models --------------------------------------------------


def wrap(folder: Path, model_type: str, drop: tuple[str, ...] = ()) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inner = {name: value for name, value in config.items() if name not in drop}
    outer = {"model_type": model_type, "text_config": inner, "architectures": ["Some"]}
    (folder / "config.json").write_text(json.dumps(outer), encoding="utf-8")


def prefixed(folder: Path, prefix: str, only: str = "") -> None:
    """Put the prefix in the place of `only` in the names that begin with it."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.startswith(only):
                tensors[prefix + name.removeprefix(only)] = tensors.pop(name)

    edit_weights(folder, change)


@pytest.fixture
def llama(check: Check) -> Check:
    shutil.rmtree(check.folder)
    make_checkpoint(check.folder, "llama", num_hidden_layers=1)
    return check


def test_voxtral_is_named(llama: Check) -> None:
    wrap(llama.folder, "voxtral")
    prefixed(llama.folder, "language_model.")
    tower = {"audio_tower.conv1.weight": torch.zeros(2)}
    llama.edit(lambda tensors: tensors.update(tower))
    message = llama.refusal()
    assert message.startswith(
        f"unsupported model_type 'voxtral' in {REPO}: its text model ('llama') can't be read on "
        f"its own ({REPO} has the tensor audio_tower.conv1.weight that the model does not use); "
        "supported:"
    )


def test_smolvlm_is_named(llama: Check) -> None:
    wrap(llama.folder, "smolvlm")
    prefixed(llama.folder, "model.text_model.", "model.")
    message = llama.refusal()
    assert message.startswith(
        f"unsupported model_type 'smolvlm' in {REPO}: its text model ('llama'"
    )
    assert f"({REPO} lacks the tensor" in message


def test_llava_is_named(llama: Check) -> None:
    wrap(llama.folder, "llava", drop=("num_attention_heads", "hidden_size"))
    prefixed(llama.folder, "language_model.")
    message = llama.refusal()
    assert message.startswith(f"unsupported model_type 'llava' in {REPO}: its text model ('llama')")
    assert "field 'num_attention_heads' is missing" in message
    assert message.count("supported: ") == 1
