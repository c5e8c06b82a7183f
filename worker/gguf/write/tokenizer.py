"""tokenizer.json → the tokenizer's metadata of a GGUF file.

Two kinds of tokenizers have a form there: byte-level BPE, with merges and the name of the
expression that splits a text, and SentencePiece, with a score for each token.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

from jobs.errors import JobError
from worker.checkpoint.source import ModelSource
from worker.checkpoint.tokenizer import BYTE_PIECE, SPACE_MARK, Tokenizer
from worker.gguf.pre_tokenizers import BUILT_IN, DIGITS, NAMES
from worker.gguf.tokenizer_keys import (
    ADD_BOS,
    ADD_EOS,
    ADD_SPACE,
    BYTE_LEVEL,
    ENDS,
    MERGES,
    MODEL,
    NAMED,
    PRE,
    SCORES,
    SENTENCEPIECE,
    SPECIAL,
    TEMPLATE,
    TEMPLATES,
    TOKENS,
    TYPES,
    Kind,
)

logger = logging.getLogger(__name__)

Values = dict[str, Any]


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
    return values | {TOKENS: tokens, TYPES: kinds} | _special(source, tokenizer)


def _tokens(given: Values, rows: int, byte_level: bool) -> tuple[list[str], list[int]]:
    """Text and type of each id. Rows of the embedding that have no token get a name."""
    tokens = [f"[PAD{index}]" for index in range(rows)]
    kinds = [int(Kind.UNUSED)] * rows
    for token, index in given["model"]["vocab"].items():
        is_byte = not byte_level and BYTE_PIECE.fullmatch(token)
        tokens[index] = token
        kinds[index] = int(Kind.BYTE if is_byte else Kind.NORMAL)
    unknown = given["model"].get("unk_token")
    for entry in given.get("added_tokens") or []:
        index, special = entry["id"], entry.get("special")
        tokens[index] = entry["content"]
        kinds[index] = int(Kind.CONTROL if special else Kind.USER_DEFINED)
    if unknown in tokens:
        kinds[tokens.index(unknown)] = int(Kind.UNKNOWN)
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
            splits.extend([BUILT_IN] if step.get("use_regex", True) else [])
        elif kind == "Digits" and step.get("individual_digits"):
            splits.append(DIGITS)
        else:
            raise _unsupported(source, f"its pre-tokenizer has the step {kind}")
    name = NAMES.get((tuple(splits), bool(model.get("ignore_merges"))))
    if name is None:
        known = ", ".join(dict.fromkeys(NAMES.values()))
        raise _unsupported(source, f"it splits texts by {splits}; supported: those of {known}")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return {MODEL: BYTE_LEVEL, PRE: name, MERGES: merges}


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
    return {MODEL: SENTENCEPIECE, PRE: "default", SCORES: scores, ADD_SPACE: spaced}


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
    for name in NAMED:
        index = tokenizer.id_of(source.special_tokens.get(f"{name}_token", ""))
        if index is not None:
            ids[name] = index
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
    values: Values = {SPECIAL[name]: index for name, index in ids.items()}
    around = tokenizer.encode("a", add_special_tokens=True)
    values[ADD_BOS] = bool(around) and around[0] == ids.get("bos", -1)
    values[ADD_EOS] = bool(around) and around[-1] == ids.get("eos", -1)
    templates = dict(source.chat_templates)
    if "default" in templates:
        values[TEMPLATE] = templates.pop("default")
    for name, text in templates.items():
        values[f"{TEMPLATE}.{name}"] = text
    if templates:
        values[TEMPLATES] = list(templates)
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
