"""Tokenizing takes bounded time and memory, whatever the prompt."""

from __future__ import annotations

import os
import random
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import JobError
from tests.worker.site import PATIENCE, wait_until
from tests.worker.sources import read_tokenizer
from tests.worker.tokenizers import CORPUS, STYLES, Style, make_tokenizer, save_tokenizer
from worker.checkpoint.tokenizer import Tokenizer
from worker.prompt import counter, encoder
from worker.prompt.encoder import PromptEncoder

CONTEXT = 131_072
LONG = CORPUS * 50


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    save_tokenizer(tmp_path, "llama3")
    return read_tokenizer(tmp_path)


def refusal(tokenizer: Tokenizer, text: str, context: int = CONTEXT) -> JobError:
    """The error for a text; a short and a long text work afterwards."""
    tokenize = PromptEncoder(tokenizer, context)
    with pytest.raises(JobError) as caught:
        tokenize.encode(text)
    assert tokenize.encode("hello") == tokenizer.encode("hello")
    assert tokenize.encode(LONG) == tokenizer.encode(LONG)
    assert caught.value.param == "messages"
    return caught.value


@pytest.mark.parametrize("style", STYLES)
def test_a_long_prompt_has_the_same_tokens_as_in_one_call(tmp_path: Path, style: Style) -> None:
    save_tokenizer(tmp_path, style)
    tokenizer = read_tokenizer(tmp_path)
    expected = tokenizer.encode(LONG)
    assert len(LONG) > encoder.SHORT_CHARACTERS
    for context in (CONTEXT, len(expected) + 1):
        assert PromptEncoder(tokenizer, context).encode(LONG) == expected
    with pytest.raises(JobError, match=f"has {len(expected)} tokens and the context holds"):
        PromptEncoder(tokenizer, len(expected)).encode(LONG)


def test_a_far_too_long_prompt_is_counted_only_as_far_as_needed(tokenizer: Tokenizer) -> None:
    digits = "1" * 1_000_000
    assert len(digits) < CONTEXT * tokenizer.longest_token
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = refusal(tokenizer, digits)
    assert error.code == "context_length_exceeded"
    words = error.message.split()
    assert words[:4] == ["the", "prompt", "has", "at"]
    assert CONTEXT <= int(words[5]) < CONTEXT + counter.COUNTED_CHARACTERS
    assert f"the context holds {CONTEXT}" in error.message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000  # KiB


def test_a_text_on_which_the_library_panics_is_refused(tokenizer: Tokenizer) -> None:
    error = refusal(tokenizer, "x" + " " * 11_000_000 + "x", 12_000_000)
    assert error.code == "invalid_request"
    assert "retry-limit-in-match over" in error.message
    assert "remove long runs of one character" in error.message


def test_tokenizing_that_takes_too_long_is_stopped(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "TOKENIZE_SECONDS", 0.2)
    error = refusal(tokenizer, "1" * 2_000_000, 3_000_000)
    assert error.code == "context_length_exceeded"
    assert "has 2000000 characters, and tokenizing it takes more than 0.2 s" in error.message


def test_tokenizing_that_takes_too_much_memory_is_stopped(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "TOKENIZE_BYTES", 300 * 2**20)
    error = refusal(tokenizer, "1" * 2_000_000, 3_000_000)
    assert error.code == "context_length_exceeded"
    assert "has 2000000 characters, and tokenizing it takes more than" in error.message


def test_half_a_character_is_refused_in_a_long_prompt(tokenizer: Tokenizer) -> None:
    error = refusal(tokenizer, LONG + "\ud83d")
    assert error.code == "invalid_request"
    assert "half a character" in error.message


def test_a_killed_child_is_replaced(tokenizer: Tokenizer) -> None:
    tokenize = PromptEncoder(tokenizer, CONTEXT)
    expected = tokenize.encode(LONG)
    pid = tokenize._child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert tokenize.encode(LONG) == expected


def test_closing_ends_the_tokenizing_of_a_prompt(tokenizer: Tokenizer) -> None:
    tokenize = PromptEncoder(tokenizer, 9_000_000)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(tokenize.encode, "1" * 5_000_000)
        wait_until(lambda: tokenize._child.pid is not None)
        tokenize.close()
        with pytest.raises(JobError, match="tokenizes long prompts ended \\(-9\\): try again"):
            running.result(PATIENCE)
    assert tokenize.encode(LONG) == tokenizer.encode(LONG)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), runs=st.integers(1, 40))
def test_the_count_is_never_higher_than_the_number_of_tokens(
    style: Style, seed: int, runs: int
) -> None:
    """Otherwise a prompt that fits would be refused."""
    chance = random.Random(seed)
    parts = ["1", " ", "a", "\n", "the ", "e\u0301", "好", "🎉", "<|im_end|>", CORPUS[:300]]
    text = "".join(chance.choice(parts) * chance.randrange(1, 60) for _ in range(runs))
    tokenizer = make_tokenizer(style)
    longest = max(len(piece) for piece in tokenizer.get_vocab())
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counter, "COUNTED_CHARACTERS", 100)
        patch.setattr(counter, "CUT", 8)
        assert counter.count(tokenizer, text, len(ids) + 1, longest) <= len(ids)
