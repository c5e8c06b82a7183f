"""Loads Lua scripts from the folder `scripts` of the package that calls them.

A script is a file `scripts/<name>.lua` of a package. Its header comment lists KEYS, ARGV, the
return value and what makes it atomic; its first statements unpack KEYS and ARGV into named locals.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def load(package: str, name: str, *preludes: str) -> str:
    """Text of `scripts/<name>.lua` in `package`, after `preludes` (function definitions)."""
    text = files(package).joinpath("scripts", f"{name}.lua").read_text(encoding="utf-8")
    return "".join([*preludes, text])
