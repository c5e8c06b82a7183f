"""Finding a model by its reference, and reading its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker.folders import WEIGHTS, loaded, refusal

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "reference", ["./nowhere/at/all", "nowhere", "", "~nobody-here/model", "x" * 5000, "a\0b"]
)
def test_a_missing_folder_is_reported_with_the_alternatives(reference: str) -> None:
    assert refusal(reference, "model_not_found") == (
        f"no folder '{reference}': give a model folder, a GGUF file, a hub repo id such as "
        "Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B-GGUF:Q8_0, or demo"
    )


def test_a_file_of_weights_stands_for_its_folder(folder: Path) -> None:
    assert loaded(folder / WEIGHTS).info.name == folder.name


def test_a_link_loop_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    assert "no folder" in refusal(tmp_path / "one", "model_not_found")


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ("config.json", "has no config.json: give a folder in Hugging Face layout, or a hub repo"),
        ("tokenizer.json", "has no tokenizer.json: download the model again, or convert"),
        (WEIGHTS, f"has no weights: neither {WEIGHTS} nor {INDEX} exists; download the model"),
    ],
)
def test_the_missing_part_of_a_folder_is_named(folder: Path, part: str, what: str) -> None:
    (folder / part).unlink()
    assert f"{folder} {what}" in refusal(folder, "model_not_found")


@pytest.mark.parametrize("part", ["tokenizer_config.json", "generation_config.json"])
def test_optional_files_may_be_missing(folder: Path, part: str) -> None:
    (folder / part).unlink()
    assert loaded(folder).info.family == "qwen3"


def test_an_empty_folder_is_not_a_model(tmp_path: Path) -> None:
    assert f"{tmp_path} has no config.json" in refusal(tmp_path, "model_not_found")
