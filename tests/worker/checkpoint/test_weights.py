"""Matching the tensors of a checkpoint with the slots of a model, and tied embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.worker.checkpoints import make_checkpoint
from tests.worker.folders import WEIGHTS, edit_json, edit_weights, loaded, logits, refusal

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop(Q_PROJ))
    assert refusal(folder) == f"{folder} lacks the tensor {Q_PROJ}"


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    edit_weights(
        folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name]
    )
    message = refusal(folder)
    assert message.startswith(f"{folder} lacks the tensors model.layers.0.input_layernorm.weight, ")
    assert message.endswith(" and 7 more")


def test_an_unused_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.extra": torch.zeros(1)}))
    assert refusal(folder) == (f"{folder} has the tensor model.extra that the model does not use")


def test_a_tensor_under_two_names_is_refused(folder: Path) -> None:
    name = "language_model.model.norm.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(32)}))
    assert refusal(folder).startswith(f"{folder} has model.norm.weight twice: as ")


@pytest.mark.parametrize("size", [2, 0])
@pytest.mark.parametrize(
    "name", ["mtp.fc.weight", "model.visual.x", "model.layers.0.self_attn.rotary_emb.inv_freq"]
)
def test_tensors_outside_the_text_model_are_skipped(
    folder: Path, name: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(size)}))
    with caplog.at_level("INFO"):
        assert loaded(folder).info.family == "qwen3"
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: ignored 1 tensor outside the text model (vision, multi-token prediction)"
    ]


def test_a_tensor_of_the_wrong_shape_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 31)}))
    assert refusal(folder) == (
        f"{folder}: tensor {Q_PROJ} has shape [64, 31], its config.json requires [64, 32]"
    )


# --- tied embeddings ------------------------------------------------------------------------------

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tie(folder: Path, tied: bool | None) -> None:
    def change(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = tied

    edit_json(folder / "config.json", change)


def without_head(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[HEAD]


def copied_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def test_a_tied_model_without_a_head_uses_the_embedding(folder: Path) -> None:
    edit_weights(folder, copied_head)
    tie(folder, False)
    untied = logits(folder)
    edit_weights(folder, without_head)
    tie(folder, True)
    assert torch.equal(logits(folder), untied)


def test_a_tied_model_may_keep_a_copy_of_the_embedding(folder: Path) -> None:
    edit_weights(folder, copied_head)
    tie(folder, True)
    kept = logits(folder)
    edit_weights(folder, without_head)
    assert torch.equal(logits(folder), kept)


def test_a_separate_head_is_used_even_if_the_config_ties(folder: Path, original: Path) -> None:
    tie(folder, True)
    assert torch.equal(logits(folder), logits(original))


@pytest.mark.parametrize("tied", [False, None])
def test_an_untied_model_without_a_head_is_refused(folder: Path, tied: bool | None) -> None:
    edit_weights(folder, without_head)
    tie(folder, tied)
    assert refusal(folder) == (
        f"{folder} lacks {HEAD}, and its config.json doesn't tie it to the embedding "
        "(tie_word_embeddings)"
    )


def test_gemma_is_tied_by_default(tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path / "gemma", "gemma3_text", num_hidden_layers=1, layer_types=None
    )
    assert HEAD not in load_file(folder / WEIGHTS)
    edit_json(folder / "config.json", lambda config: config.pop("tie_word_embeddings"))
    assert loaded(folder).info.family == "gemma3_text"
