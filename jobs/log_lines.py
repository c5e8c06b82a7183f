"""Log lines on stderr, as text or as JSON: of commands, and of the processes that they start.

A terminal gets control characters as escapes: ids and values of Redis may hold sequences that it
would obey.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

# What lines about a job or a device name beside their text: `extra` of logging.
LOG_FIELDS = ("device", "job", "run", "model", "code", "attempt")

# The categories Cc, without newline and tab, and Bidi_Control of Unicode.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class LogFormatter(logging.Formatter):
    """Log lines on stderr."""

    def format(self, record: logging.LogRecord) -> str:
        return _shown(super().format(record))


class JsonFormatter(logging.Formatter):
    """Log lines for programs: one JSON object each, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: vars(record)[name] for name in LOG_FIELDS if name in vars(record)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"), default=str)


def log_form(form: str) -> str:
    """text or json, as `form` says, or auto: text on a terminal."""
    if form != "auto":
        return form
    return "text" if sys.stderr.isatty() else "json"


def log_to_stderr(form: str = "auto", *, quiet: bool) -> None:
    """Log to stderr: this project from INFO, or with `quiet` from WARNING like all libraries.

    form: see `log_form`.
    """
    handler = logging.StreamHandler()
    text = LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(text if log_form(form) == "text" else JsonFormatter())
    logging.basicConfig(handlers=[handler])
    if not quiet:
        for package in ("jobs", "worker"):
            logging.getLogger(package).setLevel(logging.INFO)


def visible(text: str) -> str:
    """`text` with control characters as escapes, such as \\x1b; newlines and tabs stay."""
    return CONTROLS.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _shown(text: str) -> str:
    return visible(text) if sys.stderr.isatty() else text
