"""The option `--map COLUMN=FIELD`: the columns of a file that hold fields of its rows, which are
requests, or the targets of a run."""

from __future__ import annotations

import shlex
from difflib import get_close_matches

import click

from jobs.data_sets.fields import SOURCES, request_fields
from jobs.data_sets.modes import SCORE_MODES


def _of_requests(
    ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, str]:
    from jobs.data_sets.requests import ROW_FIELDS
    from jobs.data_sets.score_items import row_fields

    rows = tuple(dict.fromkeys((*SOURCES, *ROW_FIELDS)))
    known = tuple(dict.fromkeys((*rows, *request_fields())))
    mode = ctx.params.get("mode")  # of a command that has modes
    if mode in SCORE_MODES:
        known = rows = row_fields(mode)
    return _parse(pairs, known, rows)


def _of_targets(
    ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, str]:
    from jobs.data_sets.target_file import FIELDS

    return _parse(pairs, FIELDS, FIELDS)


def _parse(pairs: tuple[str, ...], known: tuple[str, ...], rows: tuple[str, ...]) -> dict[str, str]:
    """The fields of rows by the names of their columns. `rows`: the fields that a column holds most
    often."""
    names: dict[str, str] = {}
    for pair in pairs:
        column, equals, field = pair.rpartition("=")
        if not equals or not column:
            raise click.BadParameter(f"{pair!r} is not COLUMN=FIELD")
        if field not in known and column in known:
            raise click.BadParameter(
                f"{pair!r} names the field before the column: --map {shlex.quote(field)}={column}"
            )
        if field not in known:
            raise click.BadParameter(_unknown(field, known, rows))
        if names.setdefault(column, field) != field:
            raise click.BadParameter(f"the column {column!r} is given twice")
    return names


def _unknown(field: str, known: tuple[str, ...], rows: tuple[str, ...]) -> str:
    """`rows`: the fields that a column holds most often."""
    near = get_close_matches(field, known, 1, cutoff=0.75)
    if near:
        return f"unknown field {field!r}; did you mean {near[0]!r}?"
    more = " and the fields of a request, such as temperature" if rows != known else ""
    return f"unknown field {field!r}; known are {', '.join(rows)}{more}"


map_option = click.option(
    "--map",
    "names",
    multiple=True,
    callback=_of_requests,
    metavar="COLUMN=FIELD",
    help="Column that holds a field of the rows, such as question=prompt or answer=target; "
    "repeatable.",
)
target_map_option = click.option(
    "--map",
    "names",
    multiple=True,
    callback=_of_targets,
    metavar="COLUMN=FIELD",
    help="Column of --target FILE that holds target, custom_id or row_index, such as "
    "answer=target; repeatable.",
)
