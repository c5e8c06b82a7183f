"""Finding models in GGUF files, and what their metadata says."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from jobs import ChatRequest, JobError
from tests.worker.folders import loaded, logits, refusal
from tests.worker.gguf.converter import convert
from tests.worker.gguf.raw import text
from tests.worker.templates import QWEN_TEMPLATE
from worker import Engine
from worker.checkpoint.weights import find_non_finite
from worker.gguf.read.files import parts_of, pick
from worker.gguf.read.source import GgufSource
from worker.loading.find import find


def test_a_file_is_a_model_with_the_name_of_its_stem(file: Path) -> None:
    source = find(str(file))
    assert (source.name, source.reference) == ("tiny-F32", str(file))
    assert not source.needs_download
    engine = Engine.load(str(file), device="cpu", dtype="auto")
    info = engine.info
    assert (info.name, info.family, info.dtype) == ("tiny-F32", "qwen3", "float32")
    messages = [{"role": "user", "content": "Hi"}]
    request = ChatRequest(model="tiny-F32", messages=messages, max_tokens=5, temperature=0)
    done = engine.chat(request)
    assert done.usage.completion_tokens <= 5


def test_a_folder_with_one_file_is_a_model_with_its_own_name(file: Path, checkpoint: Path) -> None:
    assert find(str(file.parent)).name == file.parent.name
    assert torch.equal(logits(file.parent), logits(checkpoint))


def test_safetensors_take_precedence_in_a_folder(checkpoint: Path, file: Path) -> None:
    shutil.copytree(checkpoint, file.parent, dirs_exist_ok=True)
    assert not isinstance(find(str(file.parent)), GgufSource)


def test_a_config_beside_the_file_does_not_hide_it(checkpoint: Path, file: Path) -> None:
    shutil.copy(checkpoint / "config.json", file.parent)
    assert isinstance(find(str(file.parent)), GgufSource)


def test_several_files_in_a_folder_are_listed(file: Path) -> None:
    shutil.copy(file, file.with_name("tiny-F16.gguf"))
    assert refusal(file.parent, "model_not_found") == (
        f"folder {file.parent} has several GGUF files; there are: tiny-F16, tiny-F32. "
        "Give the path of one of these files"
    )


NAMES = (
    "Model-Q4_K_M.gguf",
    "Model-Q4_K_S.gguf",
    "Model-UD-Q4_K_M.gguf",
    "Q8_0/Model-Q8_0-00001-of-00002.gguf",
    "Q8_0/Model-Q8_0-00002-of-00002.gguf",
    "mmproj-Model-F16.gguf",
    "model.bf16.GGUF",
    "README.md",
)


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("Q4_K_S", "Model-Q4_K_S.gguf"),
        ("ud-q4_k_m", "Model-UD-Q4_K_M.gguf"),
        ("Q8_0", "Q8_0/Model-Q8_0-00001-of-00002.gguf"),
        ("BF16", "model.bf16.GGUF"),
        ("Model-Q4_K_M", "Model-Q4_K_M.gguf"),
        ("Model-Q4_K_M.gguf", "Model-Q4_K_M.gguf"),
    ],
)
def test_a_quantisation_is_picked_by_the_name_of_its_file(wanted: str, name: str) -> None:
    assert pick(NAMES, wanted, "org/m", "") == name


@pytest.mark.parametrize(
    ("wanted", "fact"),
    [
        ("Q4_K_M", "several GGUF files of org/m match 'Q4_K_M': Model-Q4_K_M, Model-UD-Q4_K_M"),
        ("Q5_K_M", "no GGUF file of org/m matches 'Q5_K_M'"),
        ("", "org/m has several GGUF files"),
        ("F16", "no GGUF file of org/m matches 'F16'"),
    ],
)
def test_a_pick_that_is_not_clear_lists_what_is_there(wanted: str, fact: str) -> None:
    with pytest.raises(JobError) as caught:
        pick(NAMES, wanted, "org/m", "Give one")
    there = "Model-Q4_K_M, Model-Q4_K_S, Model-UD-Q4_K_M, Q8_0/Model-Q8_0, model.bf16"
    assert caught.value.code == "model_not_found"
    assert caught.value.message == f"{fact}; there are: {there}. Give one"


@pytest.mark.parametrize("name", ["pipe.gguf", "p-00002-of-00002.gguf"])
def test_a_pipe_is_refused_and_not_opened(file: Path, tmp_path: Path, name: str) -> None:
    shutil.copy(file, tmp_path / "p-00001-of-00002.gguf")
    os.mkfifo(tmp_path / name)
    assert refusal(tmp_path / name, "unsupported_model") == (
        f"{tmp_path / name} is not a regular file: give a GGUF file"
    )


# --- split files ----------------------------------------------------------------------------------


@pytest.fixture
def split(checkpoint: Path, tmp_path: Path) -> list[Path]:
    convert(checkpoint, tmp_path / "s.gguf", split=5)
    parts = sorted(tmp_path.glob("s-*.gguf"))
    assert len(parts) == 3
    return parts


def test_parts_are_joined_whichever_is_named(split: list[Path], original: Path) -> None:
    assert [part.name for part in split] == parts_of("s-00001-of-00003.gguf")
    for reference in (*split, split[0].parent):
        assert torch.equal(logits(reference), logits(original))
    assert find(str(split[0])).name == "s"


def test_a_missing_part_is_named(split: list[Path]) -> None:
    split[1].unlink()
    assert refusal(split[0], "model_not_found") == (
        f"{split[1]} does not exist: download all parts of the model"
    )


def test_parts_in_the_wrong_order_are_named(split: list[Path]) -> None:
    spare = split[1].with_name("spare")
    split[1].rename(spare)
    split[2].rename(split[1])
    spare.rename(split[2])
    assert "it is part 3 of 3 by its metadata, and part 2 of 3 by its name" in refusal(split[0])


def test_a_part_under_another_name_is_named(split: list[Path]) -> None:
    alone = split[0].rename(split[0].with_name("alone.gguf"))
    assert "it is part 1 of 3 by its metadata, and part 1 of 1 by its name" in refusal(alone)


def test_a_part_of_another_model_is_named(
    split: list[Path], checkpoint: Path, tmp_path: Path
) -> None:
    extra = {"extra.weight": torch.zeros(2)}
    convert(checkpoint, tmp_path / "other" / "s.gguf", split=5, tensors=extra)
    shutil.copy(tmp_path / "other" / split[2].name, split[2])
    assert "states 14 tensors, and its parts hold 15" in refusal(split[0])


# --- metadata -------------------------------------------------------------------------------------


def rewrite(checkpoint: Path, out: Path, **metadata: Any) -> Path:
    keys = {name.replace("__", "."): value for name, value in metadata.items()}
    return convert(checkpoint, out / "changed.gguf", metadata=keys)


def test_templates_and_their_names(checkpoint: Path, tmp_path: Path) -> None:
    assert find(str(rewrite(checkpoint, tmp_path))).chat_templates == {"default": QWEN_TEMPLATE}
    keys = {
        "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template.tool_use": "tools {{ messages }}",
        "tokenizer.chat_template.rag": "rag",
    }
    path = convert(checkpoint, tmp_path / "named.gguf", metadata=keys)
    templates = find(str(path)).chat_templates
    assert sorted(templates) == ["default", "rag", "tool_use"]
    assert templates["tool_use"] == "tools {{ messages }}"


def test_the_ends_of_a_completion(checkpoint: Path, tmp_path: Path) -> None:
    """The file states one; others have the texts of such tokens."""
    source = find(str(rewrite(checkpoint, tmp_path)))
    ids = {source.tokenizer.id_of(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert source.config.eos_token_ids == ids
    assert source.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    path = rewrite(checkpoint, tmp_path, tokenizer__ggml__eot_token_id=7)
    assert find(str(path)).defaults.eos_token_ids == ids | {7}


def test_sampling_defaults(checkpoint: Path, tmp_path: Path) -> None:
    assert find(str(rewrite(checkpoint, tmp_path))).defaults.temperature is None
    sampling = {"temp": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "penalty_repeat": 1.5}
    keys = {f"general.sampling.{name}": value for name, value in sampling.items()}
    found = find(str(convert(checkpoint, tmp_path / "s.gguf", metadata=keys))).defaults
    assert (found.temperature, found.top_k, found.top_p) == (0.5, 20, 0.75)
    assert (found.min_p, found.repetition_penalty) == (0.25, 1.5)


@pytest.mark.parametrize(
    ("metadata", "fact"),
    [
        ({"general__architecture": "mamba2"}, "unsupported general.architecture 'mamba2' in "),
        (
            {"general__type": "mmproj"},
            "this file holds no model but 'mmproj' (general.type): it is a vision tower; give the",
        ),
        (
            {"general__type": "adapter"},
            "this file holds no model but 'adapter' (general.type): merge the LoRA adapter into",
        ),
        ({"general__type": "imatrix"}, "(general.type): give the GGUF file of the model"),
        ({"qwen3__block_count": 0}, "field 'qwen3.block_count' must be a whole number of at"),
        ({"qwen3__block_count": 2}, "lacks the tensors blk.1.attn_k.weight, blk.1.attn_k_norm"),
        ({"qwen3__embedding_length": 64}, "tensor token_embd.weight has shape [407, 32], its meta"),
        ({"qwen3__attention__head_count_kv": [2, 1]}, "head_count_kv differs between layers"),
        ({"qwen3__attention__causal": False}, "its attention is not causal"),
        ({"qwen3__rope__scaling__type": "su"}, "unsupported qwen3.rope.scaling.type 'su'"),
        ({"qwen3__rope__dimension_count": 8}, "qwen3.rope.dimension_count is 8 and a head has 16"),
        ({"tokenizer__ggml__model": "t5"}, "unsupported tokenizer.ggml.model 't5'; supported: "),
        ({"tokenizer__ggml__token_type": [1]}, "tokenizer.ggml.token_type has 1 value for"),
        ({"tokenizer__ggml__tokens": ["a", "b", "a"]}, "tokens has 'a' as 0 and as 2"),
        ({"general__sampling__top_p": 1.5}, "field 'top_p' must be a number above 0"),
    ],
)
def test_metadata_that_cannot_run_is_named(
    metadata: dict[str, Any], fact: str, checkpoint: Path, tmp_path: Path
) -> None:
    assert fact in refusal(rewrite(checkpoint, tmp_path, **metadata))


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        "qwen3.block_count",
        "qwen3.context_length",
        "qwen3.embedding_length",
        "qwen3.attention.head_count",
        "qwen3.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
    ],
)
def test_a_missing_key_is_named(key: str, file: Path) -> None:
    content, stored = file.read_bytes(), text(key)
    assert content.count(stored) == 1
    file.write_bytes(content.replace(stored, stored[:-1] + b"?"))
    assert refusal(file) == f"{file}: field '{key}' is missing"


def test_unused_tensors_are_named(checkpoint: Path, tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": torch.zeros(4)}
    path = convert(checkpoint, tmp_path / "x.gguf", tensors=extra)
    expected = f"{path} has the tensor blk.0.attn_sinks.weight that the model does not use"
    assert refusal(path) == expected


def test_nan_weights_are_found(checkpoint: Path, tmp_path: Path) -> None:
    """A NaN scale shows when logits are not finite; the search names the tensor of the file."""
    path = convert(checkpoint, tmp_path / "q.gguf", Type.Q8_0)
    source = find(str(path))
    content = bytearray(path.read_bytes())
    begin = source.headers().tensors["model.layers.0.mlp.up_proj.weight"].begin
    content[begin : begin + 2] = b"\xff\x7f"  # the scale of the first block
    path.write_bytes(content)
    with find(str(path)).weights() as weights:
        assert "tensor blk.0.ffn_up.weight in " in find_non_finite(weights, torch.float32, 10.0)
    assert "tensor blk.0.ffn_up.weight in " in loaded(path).not_finite(3).message


def test_quantised_weights_run_in_bfloat16_and_equal_their_values(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = convert(checkpoint, tmp_path / "q.gguf", Type.Q8_0)
    assert Engine.load(str(path), device="cpu").info.dtype == "bfloat16, Q8_0"
    ours, exact = logits(path), logits(checkpoint)
    assert 0 < (ours - exact).abs().max() / exact.abs().max() < 0.1


def test_the_fingerprint_follows_the_weights(file: Path, checkpoint: Path, tmp_path: Path) -> None:
    with find(str(file)).weights() as weights:
        first = weights.fingerprint()
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with find(str(file)).weights() as weights:
        assert weights.fingerprint() != first
