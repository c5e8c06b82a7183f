"""Separates the reasoning block of a completion (`<think>…</think>`) from its content.

Newlines are handled as in Qwen3's parsers: reasoning has no leading and trailing newlines, content
none directly after the block.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from worker.checkpoint.tokenizer import Tokenizer
from worker.text.stop_strings import overlap

KNOWN_TAGS = (("<think>", "</think>"),)


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    opening: str
    closing: str

    def left_open(self, text: str) -> bool:
        """True if the last reasoning block of a text is not closed."""
        _, found, after = text.rpartition(self.opening)
        return bool(found) and self.closing not in after


def reasoning_tags(tokenizer: Tokenizer, template: str) -> ReasoningTags | None:
    """The tags of a reasoning model: both are in its vocabulary, or both are in its template. None
    for other models."""
    for opening, closing in KNOWN_TAGS:
        in_vocabulary = all(tokenizer.id_of(tag) is not None for tag in (opening, closing))
        if in_vocabulary or (opening in template and closing in template):
            return ReasoningTags(opening, closing)
    return None


class Splitter(Protocol):
    """Separates the reasoning of one completion from its content. `copy.copy` makes one that goes
    its own way."""

    markers: Collection[str]  # the special tokens that it must see

    @property
    def inside(self) -> bool: ...

    @property
    def finished(self) -> bool:
        """True if no reasoning can follow."""

    def steady(self, text: str) -> bool:
        """True if `inside` stays as it is within the next text."""

    def push(self, text: str) -> tuple[str, str]: ...

    def flush(self) -> tuple[str, str]: ...


class ReasoningSplitter:
    """Incremental splitter for the text of one completion.

    `inside`: the prompt already contains the opening tag. Only a block at the start of the
    completion is split off; if it is never closed, the whole text is reasoning.
    """

    markers: Collection[str] = ()

    def __init__(self, tags: ReasoningTags, *, inside: bool) -> None:
        self._tags = tags
        self._state = "reasoning" if inside else "before"
        self._held = ""
        self._trim = inside  # drop newlines until the current part has text

    @property
    def inside(self) -> bool:
        """True if the text so far ends inside the reasoning block."""
        return self._state == "reasoning"

    @property
    def finished(self) -> bool:
        """True if no reasoning can follow."""
        return self._state == "content"

    def steady(self, text: str) -> bool:
        """True if `inside` stays as it is within the next text."""
        if self._state == "reasoning":
            return self._tags.closing not in self._held + text
        return self._state == "content"

    def push(self, text: str) -> tuple[str, str]:
        """Add text; returns the (content, reasoning) that no later text can change."""
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
        """The text still held back at the end, as (content, reasoning)."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            return "", held.strip("\n") if self._trim else held.rstrip("\n")
        return held, ""

    def _find_opening(self) -> None:
        """Look for the opening tag, which only white space may precede."""
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
        # Hold back trailing newlines and a possible beginning of the closing tag.
        held = overlap(self._held, self._tags.closing)
        text = self._held[: len(self._held) - held].rstrip("\n")
        self._held = self._held[len(text) :]
        return text

    def _read_content(self) -> str:
        text, self._held = self._held, ""
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        return text
