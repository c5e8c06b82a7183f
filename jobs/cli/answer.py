"""Showing a streamed answer: the answer on stdout, the reasoning dim beside it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from jobs import ChatChunk, ChatCompletion


def print_json(data: Any) -> None:
    """One line of JSON on stdout; times in ISO 8601."""
    click.echo(json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=_plain))


def _plain(value: datetime) -> str:
    return value.isoformat()


class Once:
    """Passes a growing text on; after a restart, only what goes beyond what was passed before."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._text = self.shown = ""

    def add(self, piece: str) -> None:
        self._text += piece
        if self.shown.startswith(self._text):
            return
        if self._text.startswith(self.shown):
            self._write(self._text[len(self.shown) :])
        else:
            self._write("\n" + self._text)
        self.shown = self._text

    def restart(self) -> None:
        self._text = ""


def show(chunks: Iterable[ChatChunk], *, reasoning: bool = True) -> None:
    """Write the first choice as it comes: content on stdout; reasoning dim, on stdout too if it
    is a terminal, else on stderr."""
    terminal = sys.stdout.isatty()

    def think(text: str) -> None:
        click.echo(click.style(text, dim=True), nl=False, err=not terminal)

    content = Once(lambda text: click.echo(text, nl=False))
    thought = Once(think if reasoning else lambda text: None)
    for chunk in chunks:
        if chunk.reset:
            click.echo("\nthe worker was lost; another one starts again", err=True)
            content.restart()
            thought.restart()
        for choice in chunk.choices:
            if choice.index != 0:
                continue
            thought.add(choice.delta.reasoning_content or "")
            if choice.delta.content:
                if thought.shown and not content.shown and reasoning:
                    click.echo("\n", err=not terminal)
                content.add(choice.delta.content)
    if content.shown:
        click.echo()


def show_others(completion: ChatCompletion) -> None:
    """The choices after the first one, which `show` has written."""
    for choice in completion.choices[1:]:
        click.echo(f"\n{choice.message.content or ''}")
