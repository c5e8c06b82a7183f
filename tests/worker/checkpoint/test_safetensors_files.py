"""Safetensors files: headers, shards, fingerprint. Errors name the file and the fact."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from tests.worker.folders import (
    WEIGHTS,
    edit_json,
    edit_weights,
    loaded,
    logits,
    refusal,
    set_header,
)

INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_a_truncated_header_is_named(folder: Path, size: int) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:size])
    message = refusal(folder)
    assert message.startswith(f"{file} is {'broken' if size else 'empty'}: ")
    assert message.endswith("; download the model again")
    assert str(size) in message


def test_truncated_weights_are_named(folder: Path) -> None:
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
def test_a_malformed_header_is_named(folder: Path, header: object, fact: str) -> None:
    set_header(folder, header, b"\0" * 8)
    message = refusal(folder)
    assert message.startswith(f"{folder / WEIGHTS} is broken: {fact}")
    assert message.endswith("; download the model again")


def test_an_unsupported_dtype_of_the_weights_is_named(folder: Path) -> None:
    entry = {"dtype": "I8", "shape": [8], "data_offsets": [0, 8]}
    set_header(folder, {"a": entry}, b"\0" * 8)
    assert refusal(folder) == (
        f"{folder} stores 1 of its 1 tensors as I8, such as a, like a quantised checkpoint; "
        "supported: F64, F32, F16, BF16, and F8_E4M3 or U8 (MXFP4) with a quantization_config: use "
        "the unquantised checkpoint"
    )


def test_overlapping_tensors_are_refused_when_they_are_read(folder: Path) -> None:
    """The safetensors library detects what the check of the headers doesn't."""
    raw = (folder / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    norm = header["model.norm.weight"]
    norm["data_offsets"] = [place + 4 for place in norm["data_offsets"]]
    set_header(folder, header, raw[8 + length :] + b"\0" * 4)
    message = refusal(folder)
    assert message.startswith(f"{folder / WEIGHTS} is broken: tensor ")
    assert message.endswith("; download the model again")


# --- shards ---------------------------------------------------------------------------------------


def test_shards_give_the_same_weights_as_one_file(original: Path, sharded: Path) -> None:
    assert not (sharded / WEIGHTS).exists()
    assert torch.equal(logits(sharded), logits(original))
    assert loaded(sharded).info.fingerprint == loaded(original).info.fingerprint


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


def test_a_shard_that_is_a_link_loop_is_named(sharded: Path) -> None:
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
def test_an_index_may_only_name_files(sharded: Path, file: str) -> None:
    put(sharded, Q_PROJ, file)
    assert refusal(sharded, "model_not_found").startswith(
        f"{sharded / INDEX} names the shard {file}"
    )


def test_a_shard_with_a_name_that_is_too_long_is_reported(sharded: Path) -> None:
    put(sharded, Q_PROJ, "x" * 5000)
    assert refusal(sharded).endswith(
        "it cannot be opened (File name too long); download the model again"
    )


# --- fingerprint ----------------------------------------------------------------------------------


def test_the_fingerprint_changes_with_any_tensor(folder: Path, original: Path) -> None:
    before = loaded(original).info.fingerprint
    assert loaded(folder).info.fingerprint == before
    for name in (Q_PROJ, "model.norm.weight"):

        def change(tensors: dict[str, torch.Tensor], name: str = name) -> None:
            tensors[name].view(-1)[0] += 1

        edit_weights(folder, change)
        after = loaded(folder).info.fingerprint
        assert after != before
        before = after
