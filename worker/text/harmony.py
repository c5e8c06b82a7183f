"""Separates the messages of a completion in the harmony format (gpt-oss).

A completion is a series of messages, `<|channel|>analysis<|message|>text<|end|>`, each after the
first with `<|start|>assistant` before it. The next message also ends one that lacks its `<|end|>`.
Messages in the channel analysis are reasoning, those of other channels content. A message with a
recipient (`to=functions.name`) is a tool call: it stays content, with its header.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from worker.checkpoint.tokenizer import Tokenizer
from worker.text.stop_strings import overlap

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
# The special tokens that a splitter reads; the end of a tool call, <|call|>, ends the completion.
MARKERS = (START, CHANNEL, MESSAGE, END, "<|constrain|>")
FINAL = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"  # ends reasoning and begins the answer
HEADER_STARTS = (START, CHANNEL, MESSAGE, "to=")
# The ends of a message. A model may leave out <|end|> and <|start|>, and begin with the channel.
CHANNELS = tuple(f"{CHANNEL}{name}" for name in ("analysis", "commentary", "final"))
ENDS = (END, START, *CHANNELS)
MAX_HEADER_CHARACTERS = 256  # longer text is no header


def writes_harmony(tokenizer: Tokenizer) -> bool:
    """True if a model has the tokens of the format."""
    return all(tokenizer.id_of(marker) is not None for marker in (START, CHANNEL, MESSAGE, END))


class HarmonySplitter:
    """Incremental splitter for the text of one completion, with its markers. `prompt`: the text
    before it, which ends within a message.

    Text that no header precedes is content. Messages of a kind are joined by a newline. A header
    that is cut off by the end of the completion is left out.
    """

    markers: Collection[str] = MARKERS

    def __init__(self, prompt: str) -> None:
        self._held = ""
        self._in_header, self._reasons = True, False
        self._prefix = ""  # of the next text
        self._begun = {True: False, False: False}  # whether there is reasoning, content
        _, start, message = prompt.rpartition(START)
        if MESSAGE in message:  # the completion continues a message
            self.push(start + message)
            self._prefix, self._begun = "", {True: False, False: False}

    @property
    def inside(self) -> bool:
        """True if the text so far ends within reasoning."""
        return self._reasons and not self._in_header

    @property
    def finished(self) -> bool:
        """True if no reasoning can follow: further messages may."""
        return False

    def steady(self, text: str) -> bool:
        """True if `inside` stays as it is within the next text."""
        held = self._held + text
        return not self._in_header and not any(mark in held for mark in ENDS)

    def push(self, text: str) -> tuple[str, str]:
        """Add text; returns the (content, reasoning) that no later text can change."""
        self._held += text
        parts: dict[bool, str] = {True: "", False: ""}
        while True:
            if self._in_header and not self._read_header():
                break
            parts[self._reasons] += self._read_body()
            if not self._in_header:
                break
        return parts[False], parts[True]

    def flush(self) -> tuple[str, str]:
        """The text still held back at the end, as (content, reasoning)."""
        held, self._held = self._held, ""
        if self._in_header and (not held.strip() or held.lstrip().startswith((START, CHANNEL))):
            return "", ""
        text = self._written(held)
        return ("", text) if self._reasons else (text, "")

    def _read_header(self) -> bool:
        """Read up to the text of a message; returns whether it has begun."""
        header, message, text = self._held.partition(MESSAGE)
        start = header.lstrip()
        # Without a message, MESSAGE may be half read.
        longest = MAX_HEADER_CHARACTERS + (0 if message else len(MESSAGE))
        is_header = len(header) <= longest and (not start or start.startswith(HEADER_STARTS))
        if not message:  # the rest of its beginning may follow
            is_header |= any(begin.startswith(start) for begin in HEADER_STARTS)
        if is_header and not message:
            return False
        call = False
        self._reasons = False
        shown = ""
        if not is_header:  # a marker at its beginning ends no message
            self._held = self._held.removeprefix(START)
            if self._held.startswith(CHANNELS):
                shown, self._held = CHANNEL, self._held.removeprefix(CHANNEL)
        else:
            self._held = text
            call = re.search(r"\bto=", header) is not None
            channel = re.search(re.escape(CHANNEL) + r"\s*(\w+)", header)
            self._reasons = not call and channel is not None and channel[1] == "analysis"
        self._in_header = False
        if call:
            shown = header.removeprefix(f"{START}assistant") + message
        self._prefix = ("\n" if self._begun[self._reasons] else "") + shown
        return True

    def _read_body(self) -> str:
        """The text of the message so far, up to its end."""
        ends = [at for mark in ENDS if (at := self._held.find(mark)) >= 0]
        if ends:
            at = min(ends)
            text, self._held = self._held[:at], self._held[at:].removeprefix(END)
            self._in_header = True
        else:
            at = len(self._held) - max(overlap(self._held, mark) for mark in ENDS)
            text, self._held = self._held[:at], self._held[at:]
        return self._written(text)

    def _written(self, text: str) -> str:
        if not text:
            return ""
        prefix, self._prefix = self._prefix, ""
        self._begun = {**self._begun, self._reasons: True}
        return prefix + text
