"""Models → GGUF files: our own reader and llama.cpp understand them, and the errors."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFWriter

from jobs import JobError, Sampling
from tests.worker.checkpoints import make_checkpoint
from tests.worker.gguf.write.answers import FILES, PROMPT, RECORDED, TOKENS, WIDE, digest, write
from tests.worker.tokenizers import save_tokenizer
from worker import Engine
from worker.gguf.write.model import quantise_model
from worker.gguf.write.recipe import KINDS
from worker.layers.weights import quantise
from worker.layers.weights.quantised_tensor import Weight
from worker.loading.find import find

ANSWERS = json.loads(RECORDED.read_text())
SCALE, NOPE = {"query_pre_attn_scalar": 16}, {"no_rope_layer_interval": 4}
LAYERS = ["full_attention", "linear_attention"] * 2
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e3}
UNROUNDED = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5e3, "truncate": False}
OTHER_THETA = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e3},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def quiet(done: int, total: int) -> None:
    """Shows no progress."""


@pytest.mark.oracle
@pytest.mark.parametrize("name", FILES)
def test_llama_cpp_answers_the_same_to_our_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's answers are recorded, for files with the same bytes, if weights are plain: it
    rounds activations to 8 bits otherwise. Then it chooses the same type for each tensor."""
    recorded = ANSWERS[name]
    if "types" in recorded:
        without_values(monkeypatch)
        reader = GGUFReader(write(name, tmp_path))
        types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        assert types == recorded["types"]
        return
    file = write(name, tmp_path)
    assert digest(file) == recorded["file"], "record llama.cpp's answers again"
    options = Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for reference in (file, tmp_path / "model"):
        engine = Engine.load(str(reference), device="cpu", dtype="fp32")
        (answer,) = engine.generate([PROMPT], options)
        assert list(answer.token_ids) == recorded["tokens"], reference


def without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write zeros in place of quantised values."""
    for kind in quantise.FUNCTIONS:
        size = GGML_QUANT_SIZES[kind][1]

        def zeros(groups: torch.Tensor, size: int = size) -> torch.Tensor:
            return torch.zeros(len(groups), size, dtype=torch.uint8)

        monkeypatch.setitem(quantise.FUNCTIONS, kind, zeros)


@pytest.mark.parametrize("kind", KINDS)
def test_our_reader_finds_every_tensor_up_to_its_rounding(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "it", "llama", dtype="float16", **WIDE, head_dim=64)
    source, output = find(str(path)), tmp_path / "it.gguf"
    quantise_model(source, kind, output, quiet)
    bits = int(kind.strip("BFQ").split("_")[0])
    bound = {"F16": 1e-7, "BF16": 2**-8}.get(kind, 1.6 * 2.0**-bits)
    with source.weights() as before, find(str(output)).weights() as after:
        assert before.tensors.keys() == after.tensors.keys()
        for name in before.tensors:
            expected, found = (values(file.read(name)) for file in (before, after))
            error = (found - expected).norm() / expected.norm()
            assert error < bound, name


def values(weight: Weight) -> torch.Tensor:
    return weight.float() if isinstance(weight, torch.Tensor) else weight.dequantise(torch.float32)


@pytest.mark.parametrize("style", ["qwen", "llama3", "llama2", "gemma"])
def test_the_tokenizer_and_the_template_are_in_the_file(style: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "it", "llama", vocab_size=500)
    save_tokenizer(source, style, "{{ messages[0].content }}")  # type: ignore[arg-type]
    for name in ("config.json", "generation_config.json"):  # which state ends of another tokenizer
        given = json.loads((source / name).read_text())
        (source / name).write_text(json.dumps(given | {"eos_token_id": None}))
    if style in ("llama2", "gemma"):
        like_sentencepiece(source / "tokenizer.json")
    output = tmp_path / "it.gguf"
    quantise_model(find(str(source)), "Q8_0", output, quiet)
    ours, theirs = find(str(output)), find(str(source))
    texts = (
        *(
            "Hello world",
            " leading",
            "12345 x 678",
            "naïve café",
            "一二三 漢字",
            "😀👍🏽",
            "a\n\n  b\t c",
        ),
        *("def f(x):\n    return x  # it's", "don't I'LL", "x" * 50, ""),
    )
    for text in texts:
        for special in (False, True):
            expected = theirs.tokenizer.encode(text, special)
            assert ours.tokenizer.encode(text, special) == expected, text
            assert ours.tokenizer.decode(expected) == theirs.tokenizer.decode(expected)
    assert ours.chat_templates == theirs.chat_templates
    end = theirs.tokenizer.id_of(theirs.special_tokens["eos_token"])
    assert end in ours.defaults.eos_token_ids
    for name, token in theirs.special_tokens.items():
        assert ours.special_tokens.get(name) == token


def like_sentencepiece(path: Path) -> None:
    """Every split of a token into two others is a merge, in the order of the tokens."""
    given = json.loads(path.read_text())
    vocab = given["model"]["vocab"]
    added = {entry["content"] for entry in given["added_tokens"]}
    given["model"]["merges"] = [
        [token[:cut], token[cut:]]
        for token in sorted(vocab, key=lambda token: vocab[token])
        if token not in added
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    path.write_text(json.dumps(given))


def test_merges_that_scores_cannot_express_are_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "it", "llama", vocab_size=500)
    save_tokenizer(source, "llama2", None)
    with pytest.raises(JobError, match="its merges are not those of a SentencePiece model"):
        quantise_model(find(str(source)), "Q8_0", tmp_path / "it.gguf", quiet)


def test_bytes_do_not_depend_on_the_file_name_or_the_shards(tmp_path: Path) -> None:
    one = make_checkpoint(tmp_path / "one" / "it")
    two = make_checkpoint(tmp_path / "two" / "it", shards=2)
    for folder, name in ((one, "a.gguf"), (two, "b.gguf")):
        quantise_model(find(str(folder)), "Q8_0", folder / name, quiet)
    assert (one / "a.gguf").read_bytes() == (two / "b.gguf").read_bytes()


def test_progress_ends_at_the_number_of_parameters(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = find(str(make_checkpoint(tmp_path / "it")))
    written = quantise_model(
        source, "Q8_0", tmp_path / "it.gguf", lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (written.parameters, written.parameters)
    assert written.bytes == (tmp_path / "it.gguf").stat().st_size


@pytest.mark.parametrize(
    ("family", "fields", "fact"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias is true, which GGUF files"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("mistral", {"sliding_window": 9}, "its layers attend within a sliding window"),
        ("gemma3_text", {}, "query_pre_attn_scalar is not 16"),
        ("gemma2", {}, "query_pre_attn_scalar is not 16"),
        ("gemma2", {**SCALE, "final_logit_softcapping": None}, "final_logit_softcapping is null"),
        ("gemma2", {**SCALE, "layer_types": ["full_attention"] * 4}, "do not slide but for every"),
        ("ministral", {}, "its layers attend within a sliding window of 9 tokens"),
        ("qwen2_moe", {}, "norm_topk_prob is true"),
        ("qwen2_moe", {"norm_topk_prob": False, "qkv_bias": False}, "qkv_bias is false"),
        ("qwen3_next", {"linear_value_head_dim": 16}, "and linear_value_head_dim differ"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "not all of its layers have experts"),
        ("qwen3_5_text", {"layer_types": LAYERS}, "not delta nets but for every 4th"),
        ("gpt_oss", {}, "swiglu_limit is not 7.0"),
        ("smollm3", {}, "its layers do not rotate but for every 4th"),
        ("smollm3", {**NOPE, "attention_bias": True}, "attention_bias is true"),
        ("phi3", {"sliding_window": 9}, "its layers attend within a sliding window of 9 tokens"),
        ("olmo3", {"rope_parameters": OTHER_THETA}, "its sliding layers have another rope_theta"),
        ("llama", {"rope_parameters": DYNAMIC}, "RoPE of the type dynamic cannot be stored"),
        ("llama", {"rope_parameters": UNROUNDED}, "yarn with truncate false cannot be stored"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', not 'silu'"),
        ("granite", {"mlp_bias": True}, "mlp_bias is true"),
    ],
)
def test_a_model_that_has_no_form_in_gguf_files_is_refused(
    family: str, fields: dict[str, Any], fact: str, tmp_path: Path
) -> None:
    source = find(str(make_checkpoint(tmp_path / "it", family, **fields)))
    with pytest.raises(JobError) as refused:
        quantise_model(source, "Q8_0", tmp_path / "it.gguf", quiet)
    assert fact in refused.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(tmp_path / "it")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(JobError, match=r"values of blk\.1\.ffn_up\.weight are not all finite"):
        quantise_model(find(str(folder)), "Q8_0", tmp_path / "it.gguf", quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_full_disk_is_one_sentence_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = find(str(make_checkpoint(tmp_path / "it")))
    monkeypatch.setattr(GGUFWriter, "write_tensor_data", full)
    output = tmp_path / "it.gguf"
    with pytest.raises(JobError) as refused:
        quantise_model(source, "Q8_0", output, quiet)
    assert refused.value.message == f"{output} cannot be written: No space left on device"
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_a_gguf_file_is_not_quantised_again(kind: str, tmp_path: Path) -> None:
    first = tmp_path / "it.gguf"
    quantise_model(find(str(make_checkpoint(tmp_path / "it"))), kind, first, quiet)
    with pytest.raises(JobError) as refused:
        quantise_model(find(str(first)), "Q4_0", tmp_path / "other.gguf", quiet)
    assert refused.value.message == (
        f"{first} is a GGUF file already; give the original model with safetensors files"
    )


def test_an_existing_file_is_replaced_only_on_request(tmp_path: Path) -> None:
    source, output = find(str(make_checkpoint(tmp_path / "it"))), tmp_path / "it.gguf"
    output.write_text("kept")
    with pytest.raises(JobError, match="exists already; give another name, or --force"):
        quantise_model(source, "Q8_0", output, quiet)
    assert output.read_text() == "kept"
    quantise_model(source, "Q8_0", output, quiet, replace=True)
    assert output.read_bytes()[:4] == b"GGUF"
