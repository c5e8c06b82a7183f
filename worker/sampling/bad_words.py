"""Token sequences that write a word, for `bad_words`: as vLLM determines them, and those after a
space whatever their number of tokens."""

from __future__ import annotations

from collections.abc import Iterable

from worker.checkpoint.tokenizer import Tokenizer

LINE = "\n"  # tokens do not reach from one line to the next


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """One or two sequences per word: without a space before it, and after a space. A word that
    begins with a space has that form alone."""
    found: list[list[int]] = []
    for word in words:
        plain = _within_text(tokenizer, word)
        spaced = _within_text(tokenizer, " " + word.lstrip())
        found += [plain] if plain == spaced else [plain, spaced]
    return [ids for ids in found if ids]


def _within_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text at the beginning of a line but the first: some tokenizers put a space
    before the first one."""
    line = tokenizer.encode(LINE)
    ids = tokenizer.encode(LINE + text)
    if line and ids[: len(line)] == line:
        return ids[len(line) :]
    return tokenizer.encode(text)
