"""Pre-tokenizers of byte-level BPE: the kinds that llama.cpp names in `tokenizer.ggml.pre`, as
regular expressions that split a text one after the other.

White space never matches a range of characters, also beyond ASCII, as in llama.cpp (`&&\\S`).

Kinds that need more than regular expressions (kimi-k2, afmoe, superbpe), or that are not
byte-level (gemma4, whitespace), are missing.
"""

# ruff: noqa: RUF001  (characters of many scripts)

from __future__ import annotations

from collections.abc import Mapping
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
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
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
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[[一-龥ࠀ-一가-퟿]&&\S]+", r"\p{N}")
    ),
    ("deepseek-llm",): PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{CASED_LETTERS}]+",
            r"\s?[[!-/:-~！-／：-～‘-‟　-。]&&\S]+",
            r"\s+$",
            r"[[一-龥ࠀ-一가-퟿]&&\S]+",
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

# The same kinds as tokenizer.json files write them: the names with which the writer states them.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_HF_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_END}"
_HF_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_END}"
_HF_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_END = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_END}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_END}"
)
BUILT_IN = "ByteLevel"  # the expression that is built in the step of that name
DIGITS = "Digits"
# The names, by the steps that split a text and by the lookup of tokens before merging.
NAMES: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((_HF_LLAMA3,), True): "llama-bpe",
    ((_HF_LLAMA3,), False): "dbrx",
    ((_HF_QWEN2,), False): "qwen2",
    ((_HF_QWEN35,), False): "qwen35",
    ((_TEKKEN,), True): "tekken",
    ((_TEKKEN,), False): "tekken",
    ((_GPT4O,), False): "gpt-4o",
    ((BUILT_IN,), False): "gpt-2",
    ((DIGITS, BUILT_IN), False): "smollm",
}
