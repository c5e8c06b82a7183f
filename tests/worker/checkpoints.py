"""Small random checkpoints and tokenizers, made as the published ones are.

`make_checkpoint` writes a folder that both chatjobs and transformers load; `make_tokenizer` builds
the kinds of tokenizer.json that the families ship. Importing this module is cheap: transformers is
imported when the first checkpoint is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

Style = Literal["llama2", "llama3", "qwen", "gemma"]
STYLES: tuple[Style, ...] = ("llama2", "llama3", "qwen", "gemma")
FAMILIES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma3_text",
)
# Published with a vision tower around the text model: what the tower and the whole look like here.
WRAPPED = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
ZERO_CENTRED = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma3_text"}

QWEN_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nSignatures within <tools></tools>:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.searching and message.role == 'user' %}
{%- set ns.searching = false %}{%- set ns.last_query = index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}
{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}
{{- call.function.arguments }}
{%- else %}
{{- call.function.arguments | tojson }}
{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""

# --- tokenizers -----------------------------------------------------------------------------------

CORPUS = (
    """\
The quick brown fox jumps over the lazy dog, and then the dog sleeps in the warm morning sun.
What is two plus three? It is five; seven times eight is fifty-six, and 12 + 30 = 42.
A model reads the words of the user and writes the answer one token after the other.
def answer(question: str) -> str: return "the answer to " + question + " is 42"
Don't we'll they've I'm she'd it's; naïve café über señor. Привет мир. 你好世界。 こんにちは。
"""
    * 3
)

LETTERS_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LETTERS_1 = LETTERS_3.replace(r"\p{N}{1,3}", r"\p{N}")

SPECIAL: dict[Style, tuple[str, ...]] = {
    "llama2": ("<unk>", "<s>", "</s>"),
    "llama3": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    ),
    "qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "gemma": ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
}
VISIBLE: dict[Style, tuple[str, ...]] = {
    "llama2": (),
    "llama3": (),
    "qwen": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    "gemma": (),
}
NAMED: dict[Style, dict[str, str]] = {
    "llama2": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "gemma": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    },
}


def make_tokenizer(style: Style) -> Tokenizer:
    """A tokenizer of a published kind with some 400 tokens: byte-level BPE (llama3, qwen) or
    SentencePiece's BPE with byte fallback (llama2, gemma)."""
    return Tokenizer.from_str(_tokenizer_json(style))


@cache
def _tokenizer_json(style: Style) -> str:
    build = _byte_level if style in ("llama3", "qwen") else _sentencepiece
    tokenizer: Tokenizer = build(style)
    text: str = tokenizer.to_str()
    return text


def _byte_level(style: Style) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = Regex(LETTERS_3 if style == "llama3" else LETTERS_1)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    vocab, merges = _train(tokenizer, 400, pre_tokenizers.ByteLevel.alphabet())
    tokenizer.model = models.BPE(vocab=vocab, merges=merges, ignore_merges=style == "llama3")
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, style)
    if style == "qwen":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    else:
        tokenizer.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), _begin_with(tokenizer, "<|begin_of_text|>")]
        )
    return tokenizer


def _sentencepiece(style: Style) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "removed"),
            pre_tokenizers.Split("▁", "merged_with_next"),
        ]
    )
    pieces, merges = _train(trained, 160, [])
    spaces = ["▁" * count for count in range(2, 5)] if style == "gemma" else []
    merges += [("▁" * count, "▁") for count in range(1, 4)] if spaces else []
    tokens = [*SPECIAL[style], *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *spaces]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    _add_tokens(tokenizer, style)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "llama2":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        tokenizer.post_processor = _begin_with(tokenizer, "<s>")
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(steps)
        tokenizer.post_processor = _begin_with(tokenizer, "<bos>")
    return tokenizer


def _train(
    tokenizer: Tokenizer, size: int, alphabet: Iterable[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a BPE that reads CORPUS."""
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _add_tokens(tokenizer: Tokenizer, style: Style) -> None:
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL[style]]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in VISIBLE[style]]
    )


def _begin_with(tokenizer: Tokenizer, token: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token}:1 $B:1",
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )


def save_tokenizer(
    folder: Path, style: Style, chat_template: str | list[dict[str, str]] | None = None
) -> None:
    """tokenizer.json and tokenizer_config.json of a style."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(style).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED[style]}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


# --- checkpoints ----------------------------------------------------------------------------------

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_SHARED = {"shared_expert_intermediate_size": 24}
_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8},
    "qwen3": {},
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
    "qwen3_next": {**_DELTA, **_EXPERTS, **_SHARED},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS, **_SHARED},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 20,
        "tie_word_embeddings": True,
    },
}
_QWEN_VISION = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    **{"out_hidden_size": 32, "patch_size": 8},
}
_AROUND: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vision_config": {
            **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "image_size": 16, "patch_size": 8},
        },
        "image_token_index": 3,
        "mm_tokens_per_image": 4,
    },
    "qwen3_5": {"vision_config": _QWEN_VISION},
    "qwen3_5_moe": {"vision_config": _QWEN_VISION},
}
_CLASSES = {
    "llama": "Llama",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "gemma3_text": "Gemma3",
}


def make_checkpoint(
    path: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    shards: int = 1,
    dtype: str = "float32",
    **config_overrides: Any,
) -> Path:
    """A folder with a small random model and a Qwen-style tokenizer, written by transformers.

    Weights are far from degenerate, so that an error anywhere shows in the logits: matrices are
    normal with std 0.3, norm weights lie around what means "no change" to the family.
    """
    import torch

    transformers: Any = import_module("transformers")
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path, "qwen", QWEN_TEMPLATE)
    tokenizer = make_tokenizer("qwen")
    end = tokenizer.token_to_id("<|im_end|>")
    pad = tokenizer.token_to_id("<|endoftext|>")
    text = WRAPPED.get(family, family)
    prefix = _CLASSES[text]
    fields = {
        **_SIZES,
        **_FIELDS[text],
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "eos_token_id": end,
        "bos_token_id": None,
        "pad_token_id": pad,
        **config_overrides,
    }
    transformers.utils.logging.disable_progress_bar()
    if family in WRAPPED:
        config = getattr(transformers, f"{prefix}Config")(text_config=fields, **_AROUND[family])
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    else:
        suffix = "TextConfig" if family.endswith("_text") else "Config"
        config = getattr(transformers, f"{prefix}{suffix}")(**fields)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    _fill(model, text in ZERO_CENTRED, torch.Generator().manual_seed(seed))
    model.to(getattr(torch, dtype))
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[end, pad], pad_token_id=pad
    )
    model.save_pretrained(path)
    if shards > 1:
        split(path, shards)
    return path


def _fill(model: Any, zero_centred: bool, random: Any) -> None:
    """Random values for every parameter, by the kind of it."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if name.endswith("norm.weight"):
                centre = 0.0 if zero_centred and "linear_attn.norm" not in name else 1.0
                parameter.copy_(centre + 0.1 * noise)
            else:
                parameter.copy_(0.3 * noise)
    model.tie_weights()


def split(path: Path, shards: int) -> None:
    """Turn a folder's model.safetensors into shards with an index."""
    from safetensors.torch import load_file, save_file

    single = path / "model.safetensors"
    tensors = load_file(single)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    single.unlink()
