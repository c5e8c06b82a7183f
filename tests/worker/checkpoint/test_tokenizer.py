"""tokenizer.json: encoding, decoding tables and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HubTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from jobs import JobError
from tests.worker.sources import open_folder, read_tokenizer
from tests.worker.tokenizers import STYLES, Style, make_tokenizer, save_tokenizer
from worker.text.detokenizer import Detokenizer


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**values, **changes}), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path, "qwen")
    return tmp_path


def refusal(folder: Path) -> JobError:
    with pytest.raises(JobError) as caught:
        read_tokenizer(folder)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("style", STYLES)
def test_ids_and_text_are_those_of_the_tokenizers_library(tmp_path: Path, style: Style) -> None:
    save_tokenizer(tmp_path, style)
    ours, theirs = read_tokenizer(tmp_path), make_tokenizer(style)
    text = "What is 12 + 30?\n\nDon't say naïve 你好 🎉  twice."
    for special in (False, True):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special).ids
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.vocab_size == theirs.get_vocab_size()


@pytest.mark.parametrize(("style", "first"), [("llama2", "<s>"), ("gemma", "<bos>")])
def test_special_tokens_are_added_only_on_request(tmp_path: Path, style: Style, first: str) -> None:
    save_tokenizer(tmp_path, style)
    tokenizer = read_tokenizer(tmp_path)
    plain, with_special = tokenizer.encode("the"), tokenizer.encode("the", add_special_tokens=True)
    assert with_special == [tokenizer.id_of(first), *plain]


def test_special_tokens_in_a_text_are_parsed_as_special(folder: Path) -> None:
    tokenizer = read_tokenizer(folder)
    ids = tokenizer.encode("<|im_end|>")
    assert ids == [tokenizer.id_of("<|im_end|>")]
    assert tokenizer.is_special(ids[0])
    assert tokenizer.decode(ids) == ""
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_end|>"


def test_visible_added_tokens_are_not_special(folder: Path) -> None:
    tokenizer = read_tokenizer(folder)
    think = tokenizer.id_of("<think>")
    assert think is not None
    assert not tokenizer.is_special(think)
    assert tokenizer.token_bytes(think) == b"<think>"


@pytest.mark.parametrize("style", STYLES)
def test_single_byte_tokens_cover_all_bytes(tmp_path: Path, style: Style) -> None:
    save_tokenizer(tmp_path, style)
    tokenizer = read_tokenizer(tmp_path)
    single = {raw for i in range(tokenizer.vocab_size) if len(raw := tokenizer.token_bytes(i)) == 1}
    assert single == {bytes([value]) for value in range(256)}


def add(folder: Path, content: str, *, special: bool) -> int:
    file = folder / "tokenizer.json"
    inner = HubTokenizer.from_file(str(file))
    token = AddedToken(content, special=special, normalized=False)
    (inner.add_special_tokens if special else inner.add_tokens)([token])
    inner.save(str(file))
    token_id = inner.token_to_id(content)
    assert token_id is not None
    return token_id


@pytest.mark.parametrize("content", ["naïve", "Ġx", "two words", "🎉"])
def test_an_added_token_of_a_byte_level_tokenizer_decodes_as_in_the_library(
    folder: Path, content: str
) -> None:
    token_id = add(folder, content, special=False)
    tokenizer = read_tokenizer(folder)
    assert tokenizer.token_bytes(token_id).decode(errors="replace") == tokenizer.decode([token_id])


def test_an_added_token_of_sentencepiece_decodes_marks_to_spaces(tmp_path: Path) -> None:
    """Gemma's runs of spaces are added tokens."""
    save_tokenizer(tmp_path, "gemma")
    token_id = add(tmp_path, "▁▁▁▁▁", special=False)
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.token_bytes(token_id) == b"     "
    assert tokenizer.decode([token_id]) == "     "


@pytest.mark.parametrize("added", ["ĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠ", "ĠĠ🎉🎉🎉🎉🎉🎉🎉🎉"])
def test_the_longest_token_is_measured_in_bytes(folder: Path, added: str) -> None:
    """Those of a token that is written in the letters of bytes, and of one in plain text."""
    token_id = add(folder, added, special=False)
    tokenizer = read_tokenizer(folder)
    lengths = [len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
    assert tokenizer.longest_token == max(lengths) == lengths[token_id]


def test_saved_truncation_and_padding_are_ignored(folder: Path) -> None:
    tokenizer = read_tokenizer(folder)
    ids = tokenizer.encode("the answer is 42")
    inner = HubTokenizer.from_file(str(folder / "tokenizer.json"))
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    inner.save(str(folder / "tokenizer.json"))
    assert read_tokenizer(folder).encode("the answer is 42") == ids


def test_ids_may_have_gaps(folder: Path) -> None:
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    last = max(values["model"]["vocab"], key=lambda piece: values["model"]["vocab"][piece])
    del values["added_tokens"][1:]
    del values["added_tokens"][0]
    values["model"]["merges"] = []
    values["model"]["vocab"] = {
        piece: index + 7 * (piece == last) for piece, index in values["model"]["vocab"].items()
    }
    file.write_text(json.dumps(values), encoding="utf-8")
    tokenizer = read_tokenizer(folder)
    assert tokenizer.vocab_size == values["model"]["vocab"][last] + 1
    assert tokenizer.token_bytes(tokenizer.vocab_size - 2) == b""
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) != b""


def test_special_tokens_outside_the_models_vocabulary_are_plain_text(folder: Path) -> None:
    """Gemma 3's text models have no row for the image token that their tokenizer names."""
    size = read_tokenizer(folder).vocab_size
    assert add(folder, "<image>", special=True) == size
    tokenizer = read_tokenizer(folder).limited_to(size)
    assert tokenizer.vocab_size == size
    assert max(tokenizer.encode("<image>")) < size
    assert tokenizer.decode(tokenizer.encode("<image>")) == "<image>"
    assert tokenizer.encode("a <|im_end|>") == read_tokenizer(folder).encode("a <|im_end|>")


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    tokenizer = read_tokenizer(folder)
    with pytest.raises(JobError) as caught:
        tokenizer.limited_to(100)
    assert caught.value.code == "unsupported_model"
    assert caught.value.message == (
        f"{folder / 'tokenizer.json'} has {tokenizer.vocab_size} tokens and the model's vocabulary "
        "only 100: tokenizer and weights don't match; download the model again"
    )


def test_a_huge_id_is_refused_without_allocating_memory(folder: Path) -> None:
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    values["model"]["vocab"]["zzz"] = 4_000_000_000
    file.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(JobError, match="has 4000000001 tokens and the model's vocabulary only 500"):
        read_tokenizer(folder).limited_to(500)


def test_a_larger_vocabulary_of_the_model_changes_nothing(folder: Path) -> None:
    tokenizer = read_tokenizer(folder)
    assert tokenizer.limited_to(tokenizer.vocab_size + 64) is tokenizer


def test_named_special_tokens_may_be_strings_or_objects(folder: Path) -> None:
    named = {
        "eos_token": {"content": "<|im_end|>"},
        "pad_token": "<|endoftext|>",
        "bos_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    assert open_folder(folder).special_tokens == {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }


def test_tokenizer_config_may_be_absent(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    assert open_folder(folder).special_tokens == {}


def test_the_hash_depends_on_the_file(folder: Path) -> None:
    before = read_tokenizer(folder).hash
    assert read_tokenizer(folder).hash == before
    add(folder, "<more>", special=False)
    assert read_tokenizer(folder).hash != before


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    error = refusal(folder)
    assert error.code == "model_not_found"
    assert error.message == (
        f"{folder} has no tokenizer.json: download the model again, or convert its tokenizer with "
        "the tokenizers library"
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[]", b"{}", b'{"model": {"type": "Nonsense"}}', b"[" * 9999],
)
def test_a_corrupt_tokenizer_is_named(folder: Path, content: bytes) -> None:
    file = folder / "tokenizer.json"
    file.write_bytes(content)
    error = refusal(folder)
    assert error.code == "unsupported_model"
    assert str(file) in error.message
    assert error.message.endswith("download the model again")


def test_a_truncated_tokenizer_is_named(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-1000])
    assert str(file) in refusal(folder).message


@pytest.mark.parametrize("part", ["special_tokens", "chat_templates"])
def test_a_corrupt_tokenizer_config_is_named(folder: Path, part: str) -> None:
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(JobError) as caught:
        getattr(open_folder(folder), part)
    assert str(folder / "tokenizer_config.json") in caught.value.message


def test_without_a_decoder_tokens_are_joined_with_spaces(tmp_path: Path) -> None:
    words = ["<unk>", "<end>", "two", "and", "three", "is", "five", "naïve"]
    inner = HubTokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    inner.add_special_tokens(["<end>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(tmp_path)
    for ids in ([2, 3, 4, 1, 5, 6, 7, 0], [1, 6], [7], []):
        detokenizer = Detokenizer(tokenizer)
        streamed = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
        assert streamed == inner.decode(ids)


def test_ids_that_only_the_model_has_decode_to_nothing(folder: Path) -> None:
    """Published models often have more embedding rows than their tokenizer has tokens."""
    tokenizer = read_tokenizer(folder)
    detokenizer = Detokenizer(tokenizer)
    ids = [*tokenizer.encode("the"), tokenizer.vocab_size, tokenizer.vocab_size + 90]
    assert "".join(map(detokenizer.push, ids)) == tokenizer.decode(ids) == "the"


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
        {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
    ],
)
def test_an_unsupported_decoder_is_refused(folder: Path, decoder: Any) -> None:
    edit(folder, decoder=decoder)
    error = refusal(folder)
    assert error.code == "unsupported_model"
    assert "unsupported decoder" in error.message
    assert str(folder / "tokenizer.json") in error.message
