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
import shutil
import sys
from datetime import datetime
from typing import Any, TextIO

import click

from jobs.log_lines import CONTROLS, LogFormatter, visible


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


def clear_terminal() -> None:
    """Empty the terminal that stdout is; a pipe gets nothing."""
    if is_terminal(sys.stdout):
        _write("\x1b[H\x1b[2J", sys.stdout, nl=False)


def terminal_lines() -> int | None:
    """The height of the terminal that stdout is; None for a pipe."""
    return shutil.get_terminal_size().lines if is_terminal(sys.stdout) else None


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
