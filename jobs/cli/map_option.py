"""The option `--map COLUMN=FIELD`: the columns of a file that hold fields of its rows."""

from __future__ import annotations

import click

from jobs.cli.field_options import unknown_field
from jobs.data_sets.fields import SOURCES, request_fields


def _parse(ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    """The fields of rows by the names of their columns."""
    from jobs.data_sets.requests import ROW_FIELDS
    from jobs.data_sets.score_items import SCORE_MODES, row_fields

    known = tuple(dict.fromkeys((*SOURCES, *ROW_FIELDS, *request_fields())))
    mode = ctx.params.get("mode")  # of a command that has modes
    if mode in SCORE_MODES:
        known = row_fields(mode)
    names: dict[str, str] = {}
    for pair in pairs:
        column, equals, field = pair.rpartition("=")
        if not equals or not column:
            raise click.BadParameter(f"{pair!r} is not COLUMN=FIELD")
        if field not in known:
            raise click.BadParameter(unknown_field(field, known))
        if names.setdefault(column, field) != field:
            raise click.BadParameter(f"the column {column!r} is given twice")
    return names


map_option = click.option(
    "--map",
    "names",
    multiple=True,
    callback=_parse,
    metavar="COLUMN=FIELD",
    help="Column that holds a field of the rows, such as question=prompt or answer=target; "
    "repeatable.",
)
