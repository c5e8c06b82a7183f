"""The values of a tokenizer.json from the vocabulary in a file's metadata.

Two kinds: byte-level BPE with merges ("gpt2"), and SentencePiece with scores ("llama"). The ids are
those of llama.cpp's own tokenizer, which normalises no text.
"""

from __future__ import annotations

from typing import Any

from jobs.sizes import counted
from worker.checkpoint.tokenizer import SPACE_MARK, Tokenizer
from worker.gguf.pre_tokenizers import PRE_TOKENIZERS
from worker.gguf.read.metadata import Metadata
from worker.gguf.read.vocabulary import Vocabulary
from worker.gguf.tokenizer_keys import (
    ADD_BOS,
    ADD_EOS,
    ADD_SPACE,
    BYTE_LEVEL,
    MERGES,
    MODEL,
    PRE,
    SCORES,
    SENTENCEPIECE,
    Kind,
)

# Phi-3's tokens that keep the white space after them, unlike its others.
PHI3_KEEPING = ("<unk>", "<s>", "<|endoftext|>")


def adds_bos(metadata: Metadata) -> bool:
    """True if llama.cpp puts the BOS token before a text: the value in the file, else the default
    of its tokenizer."""
    kind = PRE_TOKENIZERS.get(metadata.text(PRE, "default"))
    byte_level = metadata.text(MODEL, "") == BYTE_LEVEL
    usual = kind is not None and kind.adds_bos if byte_level else True
    return metadata.boolean(ADD_BOS, usual)


def build_tokenizer(metadata: Metadata, vocabulary: Vocabulary) -> Tokenizer:
    """Raises JobError("unsupported_model")."""
    model = metadata.text(MODEL)
    if model == BYTE_LEVEL:
        parts = _byte_level(metadata, vocabulary)
    elif model == SENTENCEPIECE:
        parts = _sentencepiece(metadata, vocabulary)
    else:
        raise metadata.error(
            f"unsupported {MODEL} {model!r}; supported: {BYTE_LEVEL} (byte-level BPE) and "
            f"{SENTENCEPIECE} (SentencePiece). A tokenizer.json beside the file is used instead"
        )
    values = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, vocabulary),
        **parts,
    }
    return Tokenizer(values, metadata.path)


def _byte_level(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    name = metadata.text(PRE, "default")
    if name not in PRE_TOKENIZERS:
        raise metadata.error(
            f"unsupported {PRE} {name!r}; supported: {', '.join(sorted(PRE_TOKENIZERS))}. A "
            "tokenizer.json beside the file is used instead"
        )
    kind = PRE_TOKENIZERS[name]
    splits = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
        for one in kind.patterns
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, {**level, "use_regex": False}],
        },
        "post_processor": _template(metadata, vocabulary),
        "decoder": {**level, "use_regex": False},
        "model": {
            "type": "BPE",
            "ignore_merges": kind.ignore_merges,
            "vocab": vocabulary.ids,
            # The first space separates the two, unless it is the first character.
            "merges": [_pair(merge) for merge in metadata.texts(MERGES)],
        },
    }


def _pair(merge: str) -> list[str]:
    at = merge.find(" ", 1)
    return [merge[:at], merge[at + 1 :]] if at > 0 else [merge, ""]


def _sentencepiece(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    scores = metadata.numbers(SCORES)
    if len(scores) < len(vocabulary.tokens):
        raise metadata.error(
            f"{SCORES} has {counted(len(scores), 'value')} for "
            f"{counted(len(vocabulary.tokens), 'token')}"
        )
    prefix = metadata.boolean(ADD_SPACE, True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE_MARK}]}
    normalizer["normalizers"] = [*normalizer["normalizers"], spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.special.get("unk")
    return {
        "normalizer": normalizer if prefix else spaces,
        "pre_tokenizer": None,
        "post_processor": _template(metadata, vocabulary),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary.ids,
            "merges": _merges(vocabulary, scores),
        },
    }


def _merges(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that join to a token, the best score of the joined token first, then its
    lowest id, then the lowest id of the left one."""
    joining = {int(kind) for kind in (Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED, Kind.UNDEFINED)}
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in joining
    }
    merges: list[tuple[str, str]] = []
    for token, _ in sorted(ids.items(), key=lambda one: (-scores[one[1]], one[1])):
        pairs = [
            (ids[left], left, right)
            for at in range(1, len(token))
            if (left := token[:at]) in ids and (right := token[at:]) in ids
        ]
        if len(pairs) > 1:
            pairs.sort()
        merges += [(left, right) for _, left, right in pairs]
    return merges


def _added_tokens(metadata: Metadata, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Tokens that are found in a text before anything else. Control tokens are special: they are
    left out of the text of a completion."""
    phi3 = any(name in metadata.text("general.name", "").lower() for name in ("phi-3", "phi3"))
    # Plain numbers: comparing members of an enumeration takes longer than all the rest.
    special_kinds, user_defined = {int(Kind.CONTROL), int(Kind.UNKNOWN)}, int(Kind.USER_DEFINED)
    ends = {index for index in vocabulary.ends if vocabulary.ends_by_text(index)}
    added = []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        special = kind in special_kinds or index in ends
        if special or kind == user_defined:
            added.append(
                {
                    "id": index,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": phi3 and token not in PHI3_KEEPING,
                    "normalized": False,
                    "special": special,
                }
            )
    return added


def _template(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any] | None:
    """The post-processor that puts BOS and EOS around a text that is encoded with special
    tokens."""
    ends = [("bos", adds_bos(metadata)), ("eos", metadata.boolean(ADD_EOS, False))]
    used = {
        name: vocabulary.special[name] for name, on in ends if on and name in vocabulary.special
    }
    if not used:
        return None

    def sequence(name: str, segment: int) -> list[dict[str, Any]]:
        text = [{"Sequence": {"id": name, "type_id": segment}}]
        tokens = {
            end: [{"SpecialToken": {"id": vocabulary.tokens[index], "type_id": segment}}]
            for end, index in used.items()
        }
        return [*tokens.get("bos", []), *text, *tokens.get("eos", [])]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": {
            vocabulary.tokens[index]: {
                "id": vocabulary.tokens[index],
                "ids": [index],
                "tokens": [vocabulary.tokens[index]],
            }
            for index in used.values()
        },
    }
