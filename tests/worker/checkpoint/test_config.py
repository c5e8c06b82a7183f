"""config.json and generation_config.json: values and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.checkpoints import make_checkpoint
from tests.worker.folders import edit_json, edit_weights, loaded, logits, refusal
from worker.models.registry import FAMILIES


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"null", b"[" * 9999])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_broken_config_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    message = refusal(folder)
    assert message.startswith(str(folder / name))
    assert message.endswith("download the model again")


def test_a_config_without_model_type_names_the_families(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.pop("model_type"))
    known = ", ".join(sorted(FAMILIES))
    assert refusal(folder) == (
        f"{folder / 'config.json'}: field 'model_type' is missing; supported: {known}"
    )


def test_an_unknown_family_is_reported_with_the_supported_ones(folder: Path) -> None:
    change = {"model_type": "foo", "architectures": ["FooForCausalLM"]}
    edit_json(folder / "config.json", lambda config: config.update(change))
    known = ", ".join(sorted(FAMILIES))
    assert refusal(folder) == (
        f"unsupported model_type 'foo' in {folder} (architectures ['FooForCausalLM']); "
        f"supported: {known}"
    )


COUNT = "must be a whole number of at least 1 and at most 1000"
HEAD = "must be a whole number of at least 1 and at most 65536"
WHOLE = "must be a whole number of at least 1 and at most 2147483647"


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "additional_chat_templates",
        "model.safetensors",
    ],
)
def test_a_link_loop_is_not_treated_as_an_absent_file(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(name)
    message = refusal(folder, "model_not_found")
    assert message == f"{folder / name} is a broken symbolic link: download the model again"


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("model_type", 3, "must be a string, got 3"),
        ("text_config", [], "must be an object, got []"),
        ("hidden_size", "32", "must be a whole number of at least 1, got '32'"),
        ("hidden_size", None, "is missing"),
        ("hidden_size", 32.5, "must be a whole number of at least 1, got 32.5"),
        ("num_hidden_layers", 0, f"{COUNT}, got 0"),
        ("num_hidden_layers", 10**9, f"{COUNT}, got 1000000000"),
        ("num_hidden_layers", True, f"{COUNT}, got True"),
        ("head_dim", 10**12, f"{HEAD}, got {10**12}"),
        ("max_position_embeddings", 2**63, f"{WHOLE}, got {2**63}"),
        ("hidden_size", 2**63, f"{WHOLE}, got {2**63}"),
        ("rms_norm_eps", "1e-6", "must be a number of at least 0, got '1e-6'"),
        ("rms_norm_eps", float("nan"), "must be a number of at least 0, got nan"),
        ("tie_word_embeddings", "no", "must be true or false, got 'no'"),
        ("eos_token_id", "</s>", "must be a token id or a list of them, got '</s>'"),
        ("eos_token_id", [1, -2], "must be a token id or a list of them, got [1, -2]"),
        ("layer_types", "full", "must be a list of strings, got 'full'"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(
    folder: Path, field: str, value: object, what: str
) -> None:
    # layer_types is only read if sliding windows are enabled
    change = {field: value, "use_sliding_window": True, "sliding_window": 8}
    edit_json(folder / "config.json", lambda config: config.update(change))
    assert refusal(folder) == f"{folder / 'config.json'}: field '{field}' {what}"


def test_sizes_whose_product_overflows_give_one_sentence(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "qwen3_next")
    largest = {"linear_key_head_dim": 2**31 - 1, "linear_conv_kernel_dim": 2**31 - 1}
    edit_json(folder / "config.json", lambda config: config.update(largest))
    start = f"{folder / 'config.json'}: its sizes make impossible tensors ("
    assert refusal(folder).startswith(start)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("temperature", "hot", "must be a number of at least 0, got 'hot'"),
        ("temperature", -1, "must be a number of at least 0, got -1"),
        ("top_p", 1.5, "must be a number above 0, at most 1, got 1.5"),
        ("top_k", float("nan"), "must be a whole number, got nan"),
        ("top_k", float("inf"), "must be a whole number, got inf"),
        ("min_p", [0.1], "must be a number from 0 to 1, got [0.1]"),
        ("repetition_penalty", 0, "must be a positive number, got 0"),
        ("do_sample", "yes", "must be true or false, got 'yes'"),
        ("eos_token_id", {}, "must be a token id or a list of them, got {}"),
    ],
)
def test_an_invalid_generation_default_is_named(
    folder: Path, field: str, value: object, what: str
) -> None:
    file = folder / "generation_config.json"
    edit_json(file, lambda config: config.update({field: value}))
    assert refusal(folder) == f"{file}: field '{field}' {what}"


def _float(**changes: Any) -> dict[str, Any]:
    weights = {"type": "float", "num_bits": 8, "strategy": "channel", **changes}
    config = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}}
    return {"quantization_config": {**config, "format": "some"}}


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config (awq)"),
        ({"quantization_config": {"bits": 4, "group_size": 64}}, "quantization_config (MLX)"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantization (MLX)"),
        ({"quantization_config": {}}, "quantization_config (without quant_method)"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt 'e5m2'"),
        (_float(num_bits=4), "compressed-tensors with 4-bit float (some)"),
        (_float(type="int"), "compressed-tensors with 8-bit int (some)"),
        (_float(strategy="odd"), "compressed-tensors with the strategy 'odd'"),
    ],
)
@pytest.mark.parametrize("where", ["config", "text_config"])
def test_a_quantized_checkpoint_is_refused(
    folder: Path, where: str, field: dict[str, Any], named: str
) -> None:
    def quantize(config: dict[str, Any]) -> None:
        if where == "text_config":
            config["text_config"] = dict(config)
            config = config["text_config"]
        config.update(field)

    edit_json(folder / "config.json", quantize)
    message = refusal(folder)
    assert message.startswith(str(folder / "config.json"))
    assert message.endswith(f"{named} is not supported: use the unquantised checkpoint")


def test_defaults_and_end_tokens_come_from_both_configs_and_the_template(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(eos_token_id=7))
    values = {"eos_token_id": [8, 9], "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    edit_json(folder / "generation_config.json", lambda config: config.update(values))
    model = loaded(folder)
    end = model.tokenizer.id_of("<|im_end|>")
    assert model.defaults.eos_token_ids == {7, 8, 9, end}
    assert (model.defaults.temperature, model.defaults.top_k) == (0.6, 20)
    assert (model.defaults.top_p, model.defaults.min_p) == (0.95, None)


def test_do_sample_false_means_greedy(folder: Path) -> None:
    values = {"do_sample": False, "temperature": 0.6, "top_k": 20}
    edit_json(folder / "generation_config.json", lambda config: config.update(values))
    assert loaded(folder).defaults.temperature == 0.0
    assert loaded(folder).defaults.top_k is None


def test_a_wrapped_text_model_is_read_from_its_text_config(folder: Path, original: Path) -> None:
    def wrap(config: dict[str, Any]) -> None:
        inner = dict(config)
        config.clear()
        config.update(model_type="foo_vl", text_config=inner, vision_config={})

    edit_json(folder / "config.json", wrap)
    edit_weights(
        folder,
        lambda tensors: [
            tensors.update(
                {f"model.language_model.{name.removeprefix('model.')}": tensors.pop(name)}
            )
            for name in list(tensors)
            if name.startswith("model.")
        ],
    )
    edit_weights(folder, lambda tensors: tensors.update({"model.visual.x": torch.zeros(3)}))
    assert loaded(folder).info.family == "qwen3"
    assert torch.equal(logits(folder), logits(original))


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(vocab_size=400))
    edit_weights(
        folder,
        lambda tensors: tensors.update(
            {name: tensors[name][:400] for name in ("lm_head.weight", "model.embed_tokens.weight")}
        ),
    )
    message = refusal(folder)
    assert message.startswith(f"{folder / 'tokenizer.json'} has 407 tokens")
    assert "the model's vocabulary only 400: tokenizer and weights don't match" in message


def test_a_special_token_outside_the_models_vocabulary_is_dropped(folder: Path) -> None:
    """The image token of Gemma 3's text models."""
    token = {"id": 407, "content": "<image>", "special": True, "normalized": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    edit_json(
        folder / "tokenizer.json", lambda values: values["added_tokens"].append(token | flags)
    )
    model = loaded(folder)
    assert model.tokenizer.vocab_size == model.model.vocab_size == 407
    assert max(model.tokenizer.encode("<image>")) < 407
