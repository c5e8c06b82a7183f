"""The metadata of a tokenizer in GGUF files: its keys and their fixed values."""

from __future__ import annotations

from enum import IntEnum

TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
SCORES, MERGES = "tokenizer.ggml.scores", "tokenizer.ggml.merges"
MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
ADD_BOS, ADD_EOS = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
ADD_SPACE = "tokenizer.ggml.add_space_prefix"
SENTENCEPIECE, BYTE_LEVEL = "llama", "gpt2"  # values of tokenizer.ggml.model
TEMPLATE, TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
# The ids of special tokens.
SPECIAL = {
    name: f"tokenizer.ggml.{key}_token_id"
    for name, key in {
        "bos": "bos",
        "eos": "eos",
        "eot": "eot",
        "eom": "eom",
        "unk": "unknown",
        "sep": "seperator",  # as it is spelled in the files
        "pad": "padding",
        "mask": "mask",
        "fim_pad": "fim_pad",
        "fim_rep": "fim_rep",
        "fim_sep": "fim_sep",
    }.items()
}
NAMED = ("bos", "eos", "unk", "sep", "pad", "mask")  # those that chat templates name
# Tokens that end a completion, whatever the file says of them: files have no list of such tokens.
ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<\uff5cend▁of▁sentence\uff5c>", "[e~["),
    )
)


class Kind(IntEnum):
    """The values of tokenizer.ggml.token_type."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6
