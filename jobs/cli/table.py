"""Tables of the commands: whole values, and one line per row in pipes.

On a terminal, a row that is wider than the terminal goes on in an indented line, and only free text
is shortened: an id that is cut or broken can't be copied.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jobs.cli.output import echo, encodable, is_terminal, printable

GAP = 2  # spaces between two columns, and before a line that goes on
MIN_TEXT = 24  # columns of the terminal that free text is given on a line with others
_BREAKS = str.maketrans({one: repr(one)[1:-1] for one in "\t\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"})


class Column(NamedTuple):
    """A column. `text`: free text, which is put on one line, and shortened on terminals."""

    name: str
    right: bool = False
    text: bool = False


class Cut(NamedTuple):
    """The lines that a table may have, and how much each of its rows matters: if not all have room,
    those that matter most are shown, at least one, in their order."""

    lines: int
    importance: Sequence[float]


def number(name: str) -> Column:
    """A column of numbers."""
    return Column(name, right=True)


def free_text(name: str) -> Column:
    """A column of sentences or answers."""
    return Column(name, text=True)


def print_table(
    columns: Sequence[Column | str],
    rows: Sequence[Sequence[object]],
    *,
    fit: bool = False,
    cut: Cut | None = None,
) -> None:
    """Print rows of cells below the names of their columns. Free text is the last column. `fit`:
    a column that is wider than a terminal is shortened there like free text. `cut`: of a screen
    that does not scroll; the number of rows that are left out is printed below."""
    from rich.cells import cell_len, set_cell_size

    shown = [one if isinstance(one, Column) else Column(one) for one in columns]
    cells = [
        [_cell(value, column) for value, column in zip(row, shown, strict=True)] for row in rows
    ]
    widths = [
        max([cell_len(column.name), *(cell_len(row[index]) for row in cells)])
        for index, column in enumerate(shown)
    ]
    limit = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else sys.maxsize
    if fit:
        shown = [
            column._replace(text=column.text or width > limit - GAP)
            for column, width in zip(shown, widths, strict=True)
        ]
    more = "…" if encodable("…", sys.stdout) == "…" else "..."
    lines = list(_lines(shown, widths, limit))

    def line_of(row: Sequence[str], line: range) -> str:
        text = " " * GAP if line.start else ""
        for index in line:
            cell, width = row[index], widths[index]
            if shown[index].text and cell_len(text) + cell_len(cell) > limit:
                width = limit - cell_len(text)
                cell = set_cell_size(cell, width - cell_len(more)).rstrip() + more
            space = " " * (width - cell_len(cell))
            text += (space + cell if shown[index].right else cell + space) + " " * GAP
        return text.rstrip(" ")

    for line in lines:
        echo(line_of([column.name for column in shown], line), bold=True)
    kept = range(len(cells)) if cut is None else _kept(cut, len(lines))
    for index in kept:
        for line in lines:
            echo(line_of(cells[index], line))
    if len(kept) < len(cells):
        echo(f"{more} and {len(cells) - len(kept):,} more")


def _kept(cut: Cut, lines: int) -> Sequence[int]:
    """The rows that are shown. `lines`: of one row, and of the names of the columns."""
    count = len(cut.importance)
    if lines * (1 + count) <= cut.lines:
        return range(count)
    room = max(1, (cut.lines - 1) // lines - 1)
    ranked = sorted(range(count), key=lambda index: -cut.importance[index])
    return sorted(ranked[:room])


def _cell(value: object, column: Column) -> str:
    text = str(value)
    if column.text:
        text = " ".join(text.split())
    return encodable(printable(text.translate(_BREAKS)), sys.stdout)  # its width is that of escapes


def _lines(columns: Sequence[Column], widths: Sequence[int], limit: int) -> Iterator[range]:
    """The columns of each line of a row, as many as have room."""
    start, used = 0, 0
    for index, column in enumerate(columns):
        needed = min(widths[index], MIN_TEXT) if column.text else widths[index]
        if index > start and used + needed > limit:
            yield range(start, index)
            start, used = index, GAP
        used += widths[index] + GAP
    yield range(start, len(columns))
