"""Loads Lua scripts from the folder `scripts` of the package that calls them.

A script is a file `scripts/<name>.lua` of a package. It may open with a line `#!lua` and flags,
which Redis 7.0 and newer read: with `allow-oom`, a full Redis runs the script. Its header comment
lists KEYS, ARGV, the return value and what makes it atomic; its first statements unpack KEYS and
ARGV into named locals.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

FLAGS_LINE = "#!lua"  # how the line with the flags begins


@cache
def load(package: str, name: str, *preludes: str) -> str:
    """Text of `scripts/<name>.lua` in `package`, with `preludes` (function definitions) in front,
    but behind its line of flags."""
    text = files(package).joinpath("scripts", f"{name}.lua").read_text(encoding="utf-8")
    flags, body = split_flags(text)
    return "".join([flags, *preludes, body])


def split_flags(text: str) -> tuple[str, str]:
    """The line of flags of a script, empty if it has none, and the rest."""
    if not text.startswith(FLAGS_LINE):
        return "", text
    flags, _, body = text.partition("\n")
    return f"{flags}\n", body
