"""Figures of scores on the command line: the options that they depend on, and the names of their
groups."""

from __future__ import annotations

import click

by_option = click.option(
    "--by",
    multiple=True,
    metavar="COLUMN",
    help="Also the figures of each value of a column, or of a field of the metadata; may be "
    "repeated.",
)
seed_option = click.option(
    "--seed", default=0, show_default=True, metavar="N", help="Seed of the confidence intervals."
)


def group_text(group: dict[str, str | None], name: str) -> str:
    """The value of a column that makes groups; `all` for all rows."""
    if not group:
        return "all"
    value = group[name]
    return "none" if value is None else value
