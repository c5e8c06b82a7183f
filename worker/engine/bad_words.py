"""Token sequences that write a word, for `bad_words`: as vLLM determines them."""

from __future__ import annotations

from collections.abc import Iterable

from worker.loading.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """Two sequences per word: as the text begins with it, and after a space.

    The second one counts only if it is as long and begins with another token: other forms would
    block the space itself.
    """
    found: list[list[int]] = []
    for word in words:
        bare = tokenizer.encode(word)
        spaced = tokenizer.encode(" " + word.lstrip())
        found.append(bare)
        if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return [ids for ids in found if ids]
