"""Knows the pieces of a file whose bytes were cut for its download, and says how to join them.

Their names are all there is to see: a piece has no header of its own, or half of the file's. Parts
that each have a header (`-00001-of-00002`) are read as they are, see `worker.gguf.read.files`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MOST_NAMED = 8  # pieces in an error
WEIGHTS = (".gguf", ".safetensors")
# model.gguf.part00, model.gguf-split-a, model-part1of4.gguf
MARKED = re.compile(
    r"(?P<whole>.*?)[-._]?(?:part|split|piece|chunk)(?:[-._]?(?P<number>\d{1,5})|[-._](?P<letters>[a-z]{1,2}))"
    r"(?:[-._]?of[-._]?\d{1,5})?(?P<suffix>\.[a-z]+)?",
    re.IGNORECASE,
)
# Parts with a header each.
HEADED = re.compile(r".*-\d{5}-of-\d{5}\.(?:gguf|safetensors)", re.IGNORECASE)
# model.gguf.001, model.gguf.aa, model.gguf.1.part: other files may have such names as well.
BARE = re.compile(
    r"(?P<whole>.+)(?:[-._](?P<number>\d{1,5})(?P<suffix>\.part)|\.(?P<digits>\d{2,5})"
    r"|\.(?P<letters>a[a-z]))",
    re.IGNORECASE,
)


class _Piece(NamedTuple):
    place: tuple[int, str]  # among the pieces
    whole: str  # the name of the file that they make
    is_marked: bool
    name: str


def how_to_join(path: Path) -> str | None:
    """What a file is, with the remedy ("is one of 3 pieces …"), if it is a piece by its name and
    those beside it; None if not."""
    piece = _piece(path.name)
    if piece is None:
        return None
    try:
        beside = _pieces(one.name for one in path.parent.iterdir())
    except OSError:
        beside = []
    pieces = [one for one in beside if one[1:3] == piece[1:3]]
    if len(pieces) > 1:
        return f"is one of {len(pieces)} pieces of a file by its name: {_join(pieces)}"
    if piece.is_marked or piece.whole.lower().endswith(WEIGHTS):
        return f"is a piece of a file by its name: {_join([piece])}"
    return None


def how_to_join_among(names: Iterable[str]) -> str | None:
    """How to join the pieces of a file with weights that are among these names; None if there are
    none."""
    found = [one for one in _pieces(names) if one.whole.lower().endswith(WEIGHTS)]
    pieces = [one for one in found if one[1:3] == found[0][1:3]]
    return f"there are pieces of a file: {_join(pieces)}" if pieces else None


def _join(pieces: list[_Piece]) -> str:
    names = [shlex.quote(piece.name) for piece in pieces]
    if len(names) == 1:
        named = f"{names[0]} …"
    elif len(names) > MOST_NAMED:
        named = f"{names[0]} {names[1]} … {names[-1]}"
    else:
        named = " ".join(names)
    whole = shlex.quote(pieces[0].whole)
    return f"join all of them in order (cat {named} > {whole}), and give the whole file"


def _pieces(names: Iterable[str]) -> list[_Piece]:
    found = [piece for name in names if (piece := _piece(name)) is not None]
    return sorted(found, key=lambda piece: (piece.whole, piece.place))


def _piece(name: str) -> _Piece | None:
    if HEADED.fullmatch(name):
        return None
    marked = MARKED.fullmatch(name)
    found = marked or BARE.fullmatch(name)
    if found is None:
        return None
    given = found.groupdict()
    digits, suffix = given["number"] or given.get("digits"), given["suffix"] or ""
    place = (int(digits), "") if digits else (0, given["letters"].lower())
    kept = suffix if suffix.lower() in WEIGHTS else ""
    return _Piece(place, f"{given['whole'] or 'model'}{kept}", marked is not None, name)
