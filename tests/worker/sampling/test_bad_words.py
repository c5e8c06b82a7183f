"""bad_words: a word is blocked with and without a space before it, whatever the tokenizer."""

from __future__ import annotations

import pytest

from jobs import ChatRequest
from tests.worker.sources import read_tokenizer
from tests.worker.tokenizers import STYLES, save_tokenizer
from worker import Engine
from worker.checkpoint.tokenizer import Tokenizer
from worker.demo import MODEL_DIR
from worker.sampling.bad_words import bad_word_ids

WORDS = ("the", "then", "answer", "Fox", "zebra", "naïve", "你好", "42", "7 + 5", "o", "don't", "!")


@pytest.fixture(scope="module", params=[*STYLES, "harmony", "demo"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    if request.param == "demo":
        return read_tokenizer(MODEL_DIR)
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, request.param)
    return read_tokenizer(folder)


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_blocked_at_the_start_of_a_line_and_after_a_space(
    tokenizer: Tokenizer, word: str
) -> None:
    found = bad_word_ids(tokenizer, [word])
    for before in ("say ", "say\n", "say\n "):
        ids = tokenizer.encode(before + word)
        assert any(ids[-len(one) :] == one for one in found), before


@pytest.mark.parametrize("word", WORDS)
def test_each_sequence_writes_the_word(tokenizer: Tokenizer, word: str) -> None:
    """So that nothing else is blocked."""
    for ids in bad_word_ids(tokenizer, [word]):
        text = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert text in (word, " " + word)


def test_a_word_that_begins_with_a_space_is_blocked_after_a_space_alone(
    tokenizer: Tokenizer,
) -> None:
    (only,) = bad_word_ids(tokenizer, [" answer"])
    assert only == bad_word_ids(tokenizer, ["answer"])[-1]
    assert b"".join(map(tokenizer.token_bytes, only)) == b" answer"


def test_the_demo_does_not_say_a_bad_word() -> None:
    engine = Engine.load("demo", device="cpu")
    request = ChatRequest(
        model="demo", messages=[{"role": "user", "content": "2+3?"}], temperature=0, max_tokens=40
    )
    words = engine.chat(request).text.split()
    assert words
    for word in dict.fromkeys(words):
        answer = engine.chat(request.model_copy(update={"bad_words": [word]})).text
        assert word not in answer.split()
