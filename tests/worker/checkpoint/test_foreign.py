"""Files and folders that hold something else than a model are said for what they are, and the
remedy that the error names works. Files are known by their first bytes."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from jobs import ChatRequest
from jobs.cli import build
from tests.worker.folders import WEIGHTS, loaded, logits, refusal
from tests.worker.gguf.converter import convert
from worker import Engine
from worker.loading.find import find

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"
FOREIGN = {
    "pointer": (POINTER, "is a git-lfs pointer, not the file itself: run 'git lfs pull' in its"),
    "page": (PAGE, "is a web page, not the file itself"),
    "empty": (b"", "is empty: its download failed; download the model again"),
    "gzip": (b"\x1f\x8b\x08\x00" + b"x" * 99, "is a compressed archive: unpack it"),
}


@pytest.fixture(scope="module")
def gguf(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(original, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


# --- files by their first bytes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("sha256-5a5a0f1e", "sha256-5a5a0f1e"),
        ("model.bin", "model"),
        ("Llama-3.2-1B", "Llama-3.2-1B"),
        ("model.safetensors", "model"),
        ("blob", "blob"),
    ],
)
def test_a_gguf_file_is_known_under_any_name(
    name: str, model: str, gguf: Path, tmp_path: Path
) -> None:
    file = Path(shutil.copy(gguf, tmp_path / name))
    engine = Engine.load(str(file), device="cpu")
    assert engine.info.name == model
    request = ChatRequest(model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
    assert engine.chat(request).usage.completion_tokens <= 2


def test_a_folder_with_one_gguf_file_under_any_name_is_a_model(gguf: Path, tmp_path: Path) -> None:
    shutil.copy(gguf, tmp_path / "sha256-5a5a")
    (tmp_path / "sha256-0000").write_text('{"temperature": 1}')
    assert torch.equal(logits(tmp_path), logits(gguf))
    shutil.copy(gguf, tmp_path / "sha256-6b6b")
    assert refusal(tmp_path, "model_not_found") == (
        f"folder {tmp_path} has several GGUF files; there are: sha256-5a5a, sha256-6b6b. "
        "Give the path of one of these files"
    )
    assert torch.equal(logits(tmp_path / "sha256-6b6b"), logits(gguf))


def test_models_check_and_the_draft_know_it_too(gguf: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(gguf, tmp_path / "sha256-5a5a"))
    done = CliRunner().invoke(build(), ["models", "check", str(file), "--json"])
    assert (done.exit_code, json.loads(done.stdout)["model"]) == (0, "sha256-5a5a")
    assert Engine.load(str(gguf), device="cpu", draft=str(file)).info.name == "tiny"


@pytest.mark.parametrize("name", ["weights.safetensors", "blob", "model.bin"])
def test_a_safetensors_file_is_known_under_any_name(name: str, folder: Path) -> None:
    expected = logits(folder)
    (folder / WEIGHTS).rename(folder / name)
    assert torch.equal(logits(folder / name), expected)
    assert find(str(folder / name)).name == name.partition(".")[0]


def test_a_safetensors_file_stands_for_its_folder(folder: Path, sharded_original: Path) -> None:
    shards = sorted(sharded_original.glob("*.safetensors"))
    for file in (folder / WEIGHTS, *shards):
        assert torch.equal(logits(file), logits(folder))
        assert find(str(file)).name == file.parent.name


def test_the_only_safetensors_file_of_a_folder_is_its_model(folder: Path) -> None:
    expected = logits(folder)
    (folder / WEIGHTS).rename(folder / "weights.safetensors")
    assert torch.equal(logits(folder), expected)
    shutil.copy(folder / "weights.safetensors", folder / "other.safetensors")
    assert refusal(folder, "model_not_found").endswith(
        "there are other.safetensors, weights.safetensors, without an index: give the path of one "
        "of these"
    )
    assert torch.equal(logits(folder / "other.safetensors"), expected)


def test_weights_alone_need_their_configuration(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = Path(shutil.copy(folder / WEIGHTS, tmp_path / "alone" / "w.safetensors"))
    assert refusal(alone, "model_not_found") == (
        f"{alone} holds weights alone: put the model's config.json and tokenizer.json beside it"
    )
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, alone.parent)
    assert torch.equal(logits(alone), logits(folder))


def test_a_file_of_another_format_is_refused(folder: Path) -> None:
    file = folder / "notes"
    file.write_text("hello")
    assert refusal(file, "model_not_found") == (
        f"{file} is a file, and neither GGUF nor safetensors: give a file of these formats, or the "
        "folder of a model"
    )


# --- what downloads leave -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize(
    "name",
    [WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"],
)
def test_a_file_of_a_folder_is_said_for_what_it_is(name: str, kind: str, folder: Path) -> None:
    content, sentence = FOREIGN[kind]
    if name == "chat_template.jinja" and not content:
        return  # an empty template is a template
    path = folder / name
    whole = path.read_bytes() if path.exists() else None
    path.write_bytes(content)
    assert refusal(folder).startswith(f"{path} {sentence}")
    if whole is None:
        path.unlink()
    else:  # the remedy: the file itself
        path.write_bytes(whole)
    assert loaded(folder).info.family == "qwen3"


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("name", ["m.gguf", "m.safetensors", "sha256-5a5a"])
def test_a_single_file_is_said_for_what_it_is(
    name: str, kind: str, gguf: Path, tmp_path: Path
) -> None:
    content, sentence = FOREIGN[kind]
    (tmp_path / name).write_bytes(content)
    assert f"{tmp_path / name} is " in refusal(tmp_path / name)
    assert sentence.removeprefix("is ") in refusal(tmp_path / name)
    shutil.copy(gguf, tmp_path / name)
    assert loaded(tmp_path / name).info.family == "qwen3"


def test_a_shard_is_said_for_what_it_is(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(POINTER)
    assert refusal(sharded).startswith(f"{shard} is a git-lfs pointer")


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"")


@pytest.mark.parametrize("save", [zipped, lambda path: path.write_bytes(pickle.dumps({}))])
def test_pickles_are_not_read(save: Callable[[Path], object], folder: Path) -> None:
    pickled = folder / "pytorch_model.bin"
    save(pickled)
    assert refusal(pickled).startswith(
        f"{pickled} is a PyTorch pickle or a zip archive: unpickling could run code"
    )
    (folder / WEIGHTS).unlink()
    assert f"there are PyTorch pickles ({pickled.name}): unpickling could run code" in refusal(
        folder, "model_not_found"
    )


@pytest.mark.parametrize("place", ["{}.incomplete", ".cache/huggingface/download/x.{}.incomplete"])
def test_a_download_that_has_not_ended_is_named(place: str, folder: Path) -> None:
    partial = folder / place.format(WEIGHTS)
    partial.parent.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).rename(partial)
    assert refusal(folder, "model_not_found").endswith(
        f"its download has not ended ({partial.name}): download the model again"
    )
    assert refusal(partial, "model_not_found") == (
        f"{partial} is a part of a download that has not ended: download it again, and give the "
        "whole file"
    )
    partial.rename(folder / WEIGHTS)
    assert loaded(folder).info.family == "qwen3"


def test_a_folder_of_the_hubs_cache_names_the_one_inside(original: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--org--tiny"
    shutil.copytree(original, cache / "snapshots" / "abc")
    message = refusal(cache, "model_not_found")
    assert message.endswith(f"it is a folder of the hub's cache: give {cache}/snapshots/abc")
    assert loaded(message.rpartition(" ")[2]).info.family == "qwen3"


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    assert refusal(tmp_path, "model_not_found").startswith(
        f"{tmp_path} has no config.json: the folder is empty: "
    )


# --- adapters -------------------------------------------------------------------------------------


@pytest.fixture
def adapter(folder: Path) -> Path:
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    return folder


MERGE = "not a model: merge it into its base model (peft's merge_and_unload, then save_pretrained)"


@pytest.mark.parametrize("config", [True, False])
def test_a_lora_adapter_is_no_model(config: bool, adapter: Path) -> None:
    if not config:
        (adapter / "config.json").unlink()
    for reference in (adapter, adapter / "adapter_model.safetensors"):
        message = refusal(reference)
        assert f"{reference} holds a LoRA adapter of 'Qwen/Qwen3-0.6B', {MERGE}" in message


@pytest.mark.parametrize("content", ["", "[]", "{", '{"base_model_name_or_path": 7}'])
def test_the_base_model_of_an_adapter_may_be_unknown(content: str, adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text(content)
    assert refusal(adapter).startswith(f"{adapter} holds a LoRA adapter, {MERGE}")


def test_an_adapter_beside_a_model_is_not_applied_and_the_log_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        loaded(folder)
    assert "the LoRA adapter beside the model (adapter_config.json) is not applied" in caplog.text
