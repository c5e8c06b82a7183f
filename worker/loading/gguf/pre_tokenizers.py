"""How byte-level BPE tokenizers split a text before they merge: the kinds that llama.cpp names in
`tokenizer.ggml.pre`, as regular expressions that are applied one after the other.

Kinds that need more than regular expressions (kimi-k2, afmoe, superbpe), or that are not
byte-level (gemma4, whitespace), are missing.
"""

# ruff: noqa: RUF001  (characters of many scripts)

from __future__ import annotations

from dataclasses import dataclass

CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _words(digits: str, contractions: str = CONTRACTIONS + "|") -> str:
    """Words with the character before them, digits, punctuation with the line breaks after it."""
    return (
        contractions
        + r"[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        + SPACES
    )


def _cased(digits: str, contractions: str = "") -> str:
    """Words that begin at capital letters. The case of other than Latin letters is ignored, as
    llama.cpp does."""
    capital, small = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{before}{capital}*{small}+{contractions}|{before}{capital}+{small}*{contractions}|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
        + SPACES
    )


LLAMA3, QWEN2 = _words(r"\p{N}{1,3}"), _words(r"\p{N}")
GPT4O = _cased(r"\p{N}{1,3}", CONTRACTIONS + "?")
QWEN35 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + SPACES
)
ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    ASCII_MARKS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + SPACES,
)
# The cased letters of several alphabets, without those that have no case.
CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙ"
    "ὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    "Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


@dataclass(frozen=True)
class PreTokenizer:
    """`ignore_merges`: a piece that is a token is not merged. `adds_bos`: whether texts begin with
    the BOS token if the file doesn't state it."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


DIGITS_APART = PreTokenizer((r"\p{N}", GPT2))
_BY_NAMES: dict[tuple[str, ...], PreTokenizer] = {
    ("default",): PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
    (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        *("lfm2", "jina-v5-nano"),
    ): PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): PreTokenizer((LLAMA3,)),
    ("glm4", "glm5"): PreTokenizer((LLAMA3,), ignore_merges=True),
    ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"): PreTokenizer((QWEN2,)),
    ("stablelm2", "hunyuan", "solar-open", "grok-2"): PreTokenizer((QWEN2,)),
    ("qwen35",): PreTokenizer((QWEN35,)),
    ("ufakzeka",): PreTokenizer((_words(r"\p{N}", ""),)),
    (
        *("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat"),
        *("a.x-4.0", "mellum", "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe"),
        *("exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling"),
    ): PreTokenizer((GPT2,)),
    ("starcoder", "refact", "command-r", "smollm", "codeshell"): DIGITS_APART,
    ("exaone", "minerva-7b", "mellum2"): DIGITS_APART,
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")),
    ("tekken",): PreTokenizer((_cased(r"\p{N}"),), ignore_merges=True, adds_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): PreTokenizer((GPT4O,)),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): PreTokenizer(DEEPSEEK3),
    ("deepseek-coder",): PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
    ("deepseek-llm",): PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{CASED_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            r"[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        )
    ),
    ("poro-chat", "bloom", "gpt3-finnish"): PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    ("viking",): PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizer(
        (
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    ("seed-coder",): PreTokenizer(
        (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + SPACES,)
    ),
    ("minicpm5",): PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
}
PRE_TOKENIZERS = {name: kind for names, kind in _BY_NAMES.items() for name in names}
