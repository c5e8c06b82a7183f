"""tokenizer.json → the tokenizer's metadata of a GGUF file.

Two kinds of tokenizers have a form there: byte-level BPE, with merges and the name of the
expression that splits a text, and SentencePiece, with a score for each token.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from gguf import TokenType

from jobs.errors import JobError
from worker.checkpoint.source import ModelSource
from worker.checkpoint.tokenizer import BYTE_PIECE, SPACE_MARK, Tokenizer
from worker.gguf.read.vocabulary import ENDS

logger = logging.getLogger(__name__)

Values = dict[str, Any]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_END}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_END}"
_QWEN35 = (
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
GPT2 = "ByteLevel"  # the expression that is built in the step of that name
DIGITS = "Digits"
# What splits a text, and whether tokens are looked up before merging → tokenizer.ggml.pre.
PRE: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "dbrx",
    ((_QWEN2,), False): "qwen2",
    ((_QWEN35,), False): "qwen35",
    ((_TEKKEN,), True): "tekken",
    ((_TEKKEN,), False): "tekken",
    ((_GPT4O,), False): "gpt-4o",
    ((GPT2,), False): "gpt-2",
    ((DIGITS, GPT2), False): "smollm",
}
# Names of special tokens → the keys of their ids.
SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # as it is spelled in the files
    "pad_token": "padding",
    "mask_token": "mask",
}


def vocabulary(source: ModelSource, rows: int) -> Values:
    """The metadata `tokenizer.*` for an embedding of `rows`. Raises JobError for a tokenizer that
    has no form in GGUF files."""
    tokenizer = source.tokenizer.limited_to(rows)
    given: Values = json.loads(tokenizer.to_json())
    model = given.get("model") or {}
    if model.get("type") != "BPE":
        raise _unsupported(source, f"its model is {model.get('type')}, not BPE")
    steps = list(_steps(given.get("pre_tokenizer"), "pretokenizers"))
    byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    tokens, kinds = _tokens(given, rows, byte_level)
    if byte_level:
        values = _byte_level(source, model, steps)
    elif model.get("byte_fallback"):
        values = _sentencepiece(source, given, tokens)
    else:
        raise _unsupported(source, "it is neither byte-level nor has it byte fallback")
    values["tokens"], values["token_type"] = tokens, kinds
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()} | _special(
        source, tokenizer
    )


def _tokens(given: Values, rows: int, byte_level: bool) -> tuple[list[str], list[int]]:
    """Text and type of each id. Rows of the embedding that have no token get a name."""
    tokens = [f"[PAD{index}]" for index in range(rows)]
    kinds = [int(TokenType.UNUSED)] * rows
    for token, index in given["model"]["vocab"].items():
        is_byte = not byte_level and BYTE_PIECE.fullmatch(token)
        tokens[index] = token
        kinds[index] = int(TokenType.BYTE if is_byte else TokenType.NORMAL)
    unknown = given["model"].get("unk_token")
    for entry in given.get("added_tokens") or []:
        index, special = entry["id"], entry.get("special")
        tokens[index] = entry["content"]
        kinds[index] = int(TokenType.CONTROL if special else TokenType.USER_DEFINED)
    if unknown in tokens:
        kinds[tokens.index(unknown)] = int(TokenType.UNKNOWN)
    return tokens, kinds


def _byte_level(source: ModelSource, model: Values, steps: list[Values]) -> Values:
    splits: list[str] = []
    for step in steps:
        kind = step.get("type")
        if kind == "Split":
            splits.append(str((step.get("pattern") or {}).get("Regex")))
        elif kind == "ByteLevel":
            if step.get("add_prefix_space"):
                raise _unsupported(source, "it adds a space before a text")
            splits.extend([GPT2] if step.get("use_regex", True) else [])
        elif kind == "Digits" and step.get("individual_digits"):
            splits.append(DIGITS)
        else:
            raise _unsupported(source, f"its pre-tokenizer has the step {kind}")
    name = PRE.get((tuple(splits), bool(model.get("ignore_merges"))))
    if name is None:
        known = ", ".join(dict.fromkeys(PRE.values()))
        raise _unsupported(source, f"it splits texts by {splits}; supported: those of {known}")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return {"model": "gpt2", "pre": name, "merges": merges}


def _sentencepiece(source: ModelSource, given: Values, tokens: list[str]) -> Values:
    """Scores in place of merges: a token that is merged earlier has a higher score."""
    model = given["model"]
    merges = [
        tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair)
        for pair in model["merges"]
    ]
    vocab = model["vocab"]
    implied = {
        (token[:cut], token[cut:])
        for token in vocab
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    }
    if not implied - _fixed(given) <= set(merges):
        raise _unsupported(source, "its merges are not those of a SentencePiece model")
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    steps = [
        *_steps(given.get("normalizer"), "normalizers"),
        *_steps(given.get("pre_tokenizer"), "pretokenizers"),
    ]
    spaced = any(
        (step.get("type") == "Prepend" and step.get("prepend") == SPACE_MARK)
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": spaced}


def _fixed(given: Values) -> set[tuple[str, str]]:
    """Splits of tokens that are never merged: added ones and bytes."""
    added = {entry["content"] for entry in given.get("added_tokens") or []}
    return {
        (token[:cut], token[cut:])
        for token in given["model"]["vocab"]
        if token in added or BYTE_PIECE.fullmatch(token)
        for cut in range(1, len(token))
    }


def _special(source: ModelSource, tokenizer: Tokenizer) -> Values:
    """Special tokens, the ids that end a completion, and the chat templates."""
    ids: dict[str, int] = {}
    for name, key in SPECIAL.items():
        index = tokenizer.id_of(source.special_tokens.get(name, ""))
        if index is not None:
            ids[key] = index
    ends = sorted(source.defaults.eos_token_ids)
    if ends:
        ids.setdefault("eos", ends[0])
    known = {ids.get("eos"), *map(tokenizer.id_of, ENDS)}
    others = [index for index in ends if index not in known]
    ids |= zip(("eot", "eom"), others, strict=False)
    if len(others) > 2:
        logger.warning(
            "%s: a GGUF file has no place for %d of the tokens that end a completion: %s",
            source.name,
            len(others) - 2,
            others[2:],
        )
    values: Values = {f"tokenizer.ggml.{key}_token_id": index for key, index in ids.items()}
    around = tokenizer.encode("a", add_special_tokens=True)
    values["tokenizer.ggml.add_bos_token"] = bool(around) and around[0] == ids.get("bos", -1)
    values["tokenizer.ggml.add_eos_token"] = bool(around) and around[-1] == ids.get("eos", -1)
    templates = dict(source.chat_templates)
    if "default" in templates:
        values["tokenizer.chat_template"] = templates.pop("default")
    for name, text in templates.items():
        values[f"tokenizer.chat_template.{name}"] = text
    if templates:
        values["tokenizer.chat_templates"] = list(templates)
    return values


def _steps(step: Values | None, inner: str) -> Iterable[Values]:
    if step is None:
        return
    if step.get("type") == "Sequence":
        for one in step.get(inner) or []:
            yield from _steps(one, inner)
    else:
        yield step


def _unsupported(source: ModelSource, fact: str) -> JobError:
    return JobError(
        "unsupported_model", f"the tokenizer of {source.path} has no form in GGUF files: {fact}"
    )
