"""A model folder's way into memory: what is wrong with it is said in one sentence, by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.worker.checkpoints import make_checkpoint
from tests.worker.loading.folders import (
    WEIGHTS,
    edit_json,
    edit_weights,
    logits,
    refusal,
    resident,
    set_header,
)

INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


# --- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reference", ["./nowhere/at/all", "nowhere", "", "~nobody-here/model", "x" * 5000, "a\0b"]
)
def test_a_missing_folder_is_named_with_what_could_be_given(reference: str) -> None:
    assert refusal(reference, "model_not_found") == (
        f"no folder '{reference}': give a model folder, a hub repo id such as Qwen/Qwen3-0.6B, "
        "or demo"
    )


def test_a_file_is_not_a_folder(folder: Path) -> None:
    file = folder / WEIGHTS
    assert refusal(file, "model_not_found") == (
        f"{file} is a file: give the folder that contains it"
    )


def test_a_loop_of_links_is_no_folder(tmp_path: Path) -> None:
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
def test_a_half_folder_is_named_with_what_is_missing(folder: Path, part: str, what: str) -> None:
    (folder / part).unlink()
    assert f"{folder} {what}" in refusal(folder, "model_not_found")


@pytest.mark.parametrize("part", ["tokenizer_config.json", "generation_config.json"])
def test_what_is_not_needed_may_be_missing(folder: Path, part: str) -> None:
    (folder / part).unlink()
    assert resident(folder).info.family == "qwen3"


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    assert f"{tmp_path} has no config.json" in refusal(tmp_path, "model_not_found")


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_a_header_that_is_cut_off_is_named(folder: Path, size: int) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:size])
    message = refusal(folder)
    assert message.startswith(f"{file} is broken: ")
    assert message.endswith("; download the model again")
    assert str(size) in message


def test_weights_that_are_cut_off_are_named(folder: Path) -> None:
    file = folder / WEIGHTS
    size = file.stat().st_size - 10
    file.write_bytes(file.read_bytes()[:size])
    message = refusal(folder)
    assert message.startswith(f"{file} is broken: it is truncated: tensor ")
    assert message.endswith(f", the file at {size}; download the model again")


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "fact"),
    [
        (b"garbage!", "its header is not JSON"),
        (b"\xff\xfe\xfd\xfc", "its header is not JSON"),
        (b"[" * 9999, "its header is not JSON"),
        ([1, 2], "its header is not a JSON object"),
        ({}, "it contains no tensors"),
        ({"__metadata__": {"format": "pt"}}, "it contains no tensors"),
        ({"a": 3}, "the entry of tensor a is malformed"),
        ({"a": {}}, "the entry of tensor a is malformed"),
        ({"a": {**ENTRY, "data_offsets": [0]}}, "the entry of tensor a is malformed"),
        ({"a": {**ENTRY, "shape": "2"}}, "the entry of tensor a is malformed"),
        (
            {"a": {**ENTRY, "shape": [3]}},
            "the shape of tensor a doesn't match its size in the file",
        ),
        (
            {"a": {**ENTRY, "data_offsets": [-8, 0]}},
            "the shape of tensor a doesn't match its size in the file",
        ),
        ({"a": {**ENTRY, "data_offsets": [8, 16]}}, "it is truncated: tensor a ends at byte"),
    ],
)
def test_a_header_of_another_form_is_named(folder: Path, header: object, fact: str) -> None:
    set_header(folder, header, b"\0" * 8)
    message = refusal(folder)
    assert message.startswith(f"{folder / WEIGHTS} is broken: {fact}")
    assert message.endswith("; download the model again")


def test_weights_in_a_dtype_of_another_kind_are_named(folder: Path) -> None:
    entry = {"dtype": "I8", "shape": [8], "data_offsets": [0, 8]}
    set_header(folder, {"a": entry}, b"\0" * 8)
    assert refusal(folder) == (f"{folder} stores its weights as I8; supported: F64, F32, F16, BF16")


def test_tensors_that_overlap_are_refused_when_they_are_read(folder: Path) -> None:
    """What the headers don't show, the format's own reader does."""
    raw = (folder / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    norm = header["model.norm.weight"]
    norm["data_offsets"] = [place + 4 for place in norm["data_offsets"]]
    set_header(folder, header, raw[8 + length :] + b"\0" * 4)
    message = refusal(folder)
    assert message.startswith(f"{folder / WEIGHTS} is broken: tensor ")
    assert message.endswith("; download the model again")


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


def test_a_tensor_that_is_left_over_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.extra": torch.zeros(1)}))
    assert refusal(folder) == (f"{folder} has the tensor model.extra that the model has no use for")


def test_a_tensor_under_two_names_is_refused(folder: Path) -> None:
    name = "language_model.model.norm.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(32)}))
    assert refusal(folder).startswith(f"{folder} has model.norm.weight twice: as ")


@pytest.mark.parametrize("size", [2, 0])
@pytest.mark.parametrize(
    "name", ["mtp.fc.weight", "model.visual.x", "model.layers.0.self_attn.rotary_emb.inv_freq"]
)
def test_what_is_not_the_text_model_is_passed_over(
    folder: Path, name: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(size)}))
    with caplog.at_level("INFO"):
        assert resident(folder).info.family == "qwen3"
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: 1 tensor that isn't the text model's (vision, multi-token prediction) is "
        "passed over"
    ]


def test_a_tensor_of_the_wrong_shape_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 31)}))
    assert refusal(folder) == (
        f"{folder}: tensor {Q_PROJ} has shape [64, 31], its config.json wants [64, 32]"
    )


# --- shards ---------------------------------------------------------------------------------------


def test_shards_give_the_same_weights_as_one_file(original: Path, sharded: Path) -> None:
    assert not (sharded / WEIGHTS).exists()
    assert torch.equal(logits(sharded), logits(original))
    assert resident(sharded).info.fingerprint == resident(original).info.fingerprint


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": 3}', "[" * 9999])
def test_a_broken_index_is_named(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content, encoding="utf-8")
    assert refusal(sharded) == (
        f"{sharded / INDEX} is broken: it is not a safetensors index with a weight_map; "
        "download the model again"
    )


def test_an_index_without_tensors_is_named(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": {}}', encoding="utf-8")
    assert refusal(sharded).startswith(f"{sharded / INDEX} is broken: it contains no tensors")


def put(folder: Path, name: str, file: str) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({name: file}))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = "model-00002-of-00003.safetensors"
    (sharded / shard).unlink()
    assert refusal(sharded, "model_not_found") == (
        f"{sharded / INDEX} names the shard {shard}, which does not exist: download the model again"
    )


def test_a_shard_that_is_a_loop_of_links_is_named(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.unlink()
    shard.symlink_to(shard)
    assert str(shard.name) in refusal(sharded, "model_not_found")


def test_a_tensor_that_is_not_in_its_shard_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text(encoding="utf-8"))
    other = next(
        file for file in index["weight_map"].values() if file != index["weight_map"][Q_PROJ]
    )
    put(sharded, Q_PROJ, other)
    assert refusal(sharded) == (
        f"{sharded / INDEX} is broken: tensor {Q_PROJ} is not in {other}, where the index puts it; "
        "download the model again"
    )


@pytest.mark.parametrize(
    "file", ["../other/model.safetensors", "/etc/passwd", "a/b.safetensors", "."]
)
def test_an_index_cant_point_outside_its_folder(sharded: Path, file: str) -> None:
    put(sharded, Q_PROJ, file)
    assert refusal(sharded) == (
        f"{sharded / INDEX} is broken: shard '{file}' is outside the folder; "
        "download the model again"
    )


@pytest.mark.parametrize("file", ["", "..", "a\0b"])
def test_an_index_names_files_only(sharded: Path, file: str) -> None:
    put(sharded, Q_PROJ, file)
    assert refusal(sharded, "model_not_found").startswith(
        f"{sharded / INDEX} names the shard {file}"
    )


def test_a_shards_name_may_be_too_long(sharded: Path) -> None:
    put(sharded, Q_PROJ, "x" * 5000)
    assert refusal(sharded).endswith(
        "it cannot be opened (File name too long); download the model again"
    )


# --- what a checkpoint is -------------------------------------------------------------------------


def test_the_fingerprint_changes_with_any_tensor(folder: Path, original: Path) -> None:
    before = resident(original).info.fingerprint
    assert resident(folder).info.fingerprint == before
    for name in (Q_PROJ, "model.norm.weight"):

        def change(tensors: dict[str, torch.Tensor], name: str = name) -> None:
            tensors[name].view(-1)[0] += 1

        edit_weights(folder, change)
        after = resident(folder).info.fingerprint
        assert after != before
        before = after


def test_what_is_told_of_a_model_is_what_is_in_its_files(original: Path) -> None:
    info = resident(original).info
    tensors = load_file(original / WEIGHTS)
    assert (info.name, info.reference, info.revision) == ("tiny", str(original), None)
    assert info.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert (info.family, info.dtype, info.context_length) == ("qwen3", "float32", 512)


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


def test_a_head_of_its_own_counts_even_where_the_config_ties(folder: Path, original: Path) -> None:
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


def test_gemma_is_tied_unless_it_says_otherwise(tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path / "gemma", "gemma3_text", num_hidden_layers=1, layer_types=None
    )
    assert HEAD not in load_file(folder / WEIGHTS)
    edit_json(folder / "config.json", lambda config: config.pop("tie_word_embeddings"))
    assert resident(folder).info.family == "gemma3_text"
