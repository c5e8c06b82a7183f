"""Splits what a reasoning model writes: the block between its tags apart from the answer.

As Qwen3's parsers do it, newlines around the block belong to neither side: reasoning is given
without leading and trailing newlines, content without the newlines that follow the block.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.loading.tokenizer import Tokenizer
from worker.text.stop_strings import overlap

KNOWN_TAGS = (("<think>", "</think>"),)


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    opening: str
    closing: str


def reasoning_tags(tokenizer: Tokenizer, template: str) -> ReasoningTags | None:
    """The tags of a model that reasons: both are tokens of its vocabulary, or its template writes
    them."""
    for opening, closing in KNOWN_TAGS:
        in_vocabulary = all(tokenizer.id_of(tag) is not None for tag in (opening, closing))
        if in_vocabulary or (opening in template and closing in template):
            return ReasoningTags(opening, closing)
    return None


class ReasoningSplitter:
    """Takes the text of one completion piece by piece.

    `inside`: the prompt has opened the block already. At most one block is split off, at the start
    of the completion; a block that is never closed is all reasoning.
    """

    def __init__(self, tags: ReasoningTags, *, inside: bool) -> None:
        self._tags = tags
        self._state = "reasoning" if inside else "before"
        self._held = ""
        self._trim = inside  # newlines at the start of the present part are dropped

    @property
    def inside(self) -> bool:
        """Whether the next text belongs to the reasoning, or may."""
        return self._state == "reasoning"

    def push(self, text: str) -> tuple[str, str]:
        """What became certain: (content, reasoning)."""
        if self._state == "content" and not self._trim:
            return text, ""
        self._held += text
        content, reasoning = "", ""
        if self._state == "before":
            self._find_opening()
        if self._state == "reasoning":
            reasoning = self._read_reasoning()
        if self._state == "content":
            content = self._read_content()
        return content, reasoning

    def flush(self) -> tuple[str, str]:
        """What was held back, when no more text comes: (content, reasoning)."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            return "", held.strip("\n") if self._trim else held.rstrip("\n")
        return held, ""

    def _find_opening(self) -> None:
        """The block begins the completion, after white space at most."""
        start = self._held.lstrip()
        if start.startswith(self._tags.opening):
            self._held = start.removeprefix(self._tags.opening)
            self._state, self._trim = "reasoning", True
        elif not self._tags.opening.startswith(start):
            self._state = "content"

    def _read_reasoning(self) -> str:
        if self._trim:
            self._held = self._held.lstrip("\n")
            self._trim = not self._held
        before, closing, after = self._held.partition(self._tags.closing)
        if closing:
            self._held, self._state, self._trim = after, "content", True
            return before.rstrip("\n")
        # Newlines and what may begin the closing tag wait for what follows.
        keep = overlap(self._held, self._tags.closing)
        sure = self._held[: len(self._held) - keep].rstrip("\n")
        self._held = self._held[len(sure) :]
        return sure

    def _read_content(self) -> str:
        text, self._held = self._held, ""
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        return text
