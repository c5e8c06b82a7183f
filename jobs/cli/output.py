"""stdout and stderr of the commands. Every line that a command writes goes through this file.

No text fails on the encoding of its stream. On a terminal, control characters are shown as escapes:
answers, ids and values of Redis may hold sequences that a terminal would obey. Pipes get text as it
is.
"""

from __future__ import annotations

import codecs
import io
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any, TextIO

import click

from jobs.log_lines import CONTROLS, LogFormatter, visible

VIEW_TRIES = 3  # until a view fits the screen
_STYLES = re.compile("\x1b\\[[0-9;]*m")  # colours and bold text of our own


def open_streams() -> None:
    """From now on stdout and stderr write characters that their encodings lack as escapes. A stream
    that was closed before the start discards its output, and no other file gets its descriptor."""
    sys.stdout, sys.stderr = sys.stdout or open_devnull(), sys.stderr or open_devnull()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def open_devnull() -> TextIO:
    """Return a stream that discards its output."""
    return open(os.devnull, "w", encoding="utf-8")


def echo(text: str = "", *, err: bool = False, nl: bool = True, **style: bool) -> None:
    """Write text to stdout, or to stderr with `err`. `style`: of click, on terminals."""
    stream = _stream(err)
    shown = printable(text, err=err)
    _write(_styled(shown, stream, **style) if style else shown, stream, nl=nl)


def report(label: str, text: str, colour: str) -> None:
    """Write an error or a warning to stderr, with a coloured label before it."""
    label = _styled(f"{label}:", sys.stderr, fg=colour)
    _write(f"{label} {printable(text, err=True)}", sys.stderr)


def print_json(value: Any, *, err: bool = False) -> None:
    """Write `value` as one line of JSON; times in ISO 8601. ASCII, unless the encoding of the
    stream has all characters."""
    stream = _stream(err)
    text = json.dumps(
        value, ensure_ascii=not _is_unicode(stream), separators=(",", ":"), default=_iso_format
    )
    if is_terminal(stream):
        text = CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    _write(text, stream)


def printable(text: str, *, err: bool = False) -> str:
    """`text` as it may be written to stdout, or to stderr with `err`."""
    return visible(text) if is_terminal(_stream(err)) else text


def encodable(text: str, stream: TextIO) -> str:
    """`text` with the characters that the encoding of `stream` lacks as escapes."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def is_terminal(stream: TextIO) -> bool:
    """True if `stream` is a terminal."""
    return stream.isatty()


class _View(io.StringIO):
    """What is written to a stream for a view, as that stream would show it."""

    encoding = ""  # replaced by that of the stream

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self._terminal = is_terminal(stream)

    def isatty(self) -> bool:
        return self._terminal


def show_view(title: str, write: Callable[[int | None], None]) -> None:
    """Replace the last view on the terminal that stdout is: by a title, what `write` writes to
    stderr, if that is a terminal, then what it writes to stdout. `write` gets the number of lines
    that it should fill; further ones are counted. A pipe gets all lines as they are written, and
    `write` gets None."""
    if not is_terminal(sys.stdout):
        echo(title)
        write(None)
        return
    columns, lines = shutil.get_terminal_size()
    room = lines
    for _ in range(VIEW_TRIES):
        faults, facts = (view.getvalue() for view in _written(write, room))
        above = faults if is_terminal(sys.stderr) else ""
        text = f"{title}\n{above}{facts}".removesuffix("\n").split("\n")
        excess = sum(_heights(text, columns)) - (lines - 1)  # the cursor is in the last line
        if excess <= 0:
            break
        room -= excess
    if not above:  # stderr is elsewhere
        _write(faults, sys.stderr, nl=False)
    _write("\x1b[H\x1b[2J" + "\n".join(_cut(text, columns, lines - 1)), sys.stdout)


def _written(write: Callable[[int | None], None], room: int) -> tuple[_View, _View]:
    """What `write` writes to stderr and to stdout."""
    streams = sys.stderr, sys.stdout
    views = _View(sys.stderr), _View(sys.stdout)
    sys.stderr, sys.stdout = views
    try:
        write(room)
    finally:
        sys.stderr, sys.stdout = streams
    return views


def _heights(lines: Sequence[str], columns: int) -> list[int]:
    """How many lines of the terminal each takes."""
    from rich.cells import cell_len

    return [max(1, -(-cell_len(_STYLES.sub("", line)) // columns)) for line in lines]


def _cut(lines: Sequence[str], columns: int, room: int) -> Sequence[str]:
    """The lines that have room, and how many have not. At least the first two are kept."""
    ends = [*accumulate(_heights(lines, columns))]
    if ends[-1] <= room:
        return lines
    kept = max(2, sum(end < room for end in ends))
    return [*lines[:kept], f"{len(lines) - kept} more lines have no room"]


def show_log_lines() -> None:
    """Format the warnings of libraries, which logging writes to stderr if no handler is set."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LogFormatter())


def _styled(text: str, stream: TextIO, **style: Any) -> str:
    context = click.get_current_context(silent=True)
    colours = is_terminal(stream) and (context is None or context.color is not False)
    return click.style(text, **style) if colours else text


def _write(text: str, stream: TextIO, *, nl: bool = True) -> None:
    try:
        stream.write(f"{text}\n" if nl else text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if stream is not sys.stdout:
            raise
        sys.stdout = open_devnull()  # the interpreter flushes it at exit
        raise OSError(error.errno, f"can't write to stdout: {error.strerror}") from None


def _stream(err: bool) -> TextIO:
    return sys.stderr if err else sys.stdout


def _is_unicode(stream: TextIO) -> bool:
    return codecs.lookup(getattr(stream, "encoding", None) or "utf-8").name.startswith("utf")


def _iso_format(value: datetime) -> str:
    return value.isoformat()
