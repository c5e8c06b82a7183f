"""Reads the text of one completion: reasoning, content and tool calls."""

from __future__ import annotations

from typing import NamedTuple

from worker.text.reasoning import Splitter
from worker.text.tool_call import Call
from worker.text.tool_parser import ToolParser


class Part(NamedTuple):
    """The parts of an answer that one piece of text added."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class AnswerReader:
    """Incremental reader. `splitter`: None if the model doesn't reason; `parser`: None if calls are
    not looked for. There are no calls within reasoning."""

    def __init__(self, splitter: Splitter | None = None, parser: ToolParser | None = None) -> None:
        self._splitter, self._parser = splitter, parser
        readers = [reader for reader in (splitter, parser) if reader is not None]
        self.markers = [marker for reader in readers for marker in reader.markers]  # to be shown

    @property
    def reasons(self) -> bool:
        """True if the text so far ends within the reasoning."""
        return self._splitter is not None and self._splitter.inside

    def steady(self, text: str) -> bool:
        """True if the reasoning neither begins nor ends within the next text."""
        return self._splitter is None or self._splitter.steady(text)

    def push(self, text: str, *, last: bool) -> Part:
        """Add text; returns what no later text can change, or all of the rest if it is the last."""
        content, reasoning = text, ""
        if self._splitter is not None:
            content, reasoning = self._splitter.push(text)
            if last:
                more, thoughts = self._splitter.flush()
                content, reasoning = content + more, reasoning + thoughts
        if self._parser is None:
            return Part(content, reasoning)
        content, calls = self._parser.push(content)
        if last:
            more, found = self._parser.flush()
            content, calls = content + more, calls + found
        return Part(content, reasoning, tuple(calls))
