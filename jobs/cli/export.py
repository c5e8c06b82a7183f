"""`chatjobs results RUN --format F`: the rows of a run as one file, or on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs.cli.interrupts import interrupts_raise
from jobs.cli.output import echo
from jobs.results.export.formats import FORMATS, ORDERS, TEXT_FORMATS, Format, Order
from jobs.sizes import counted

if TYPE_CHECKING:
    from jobs import Results

STDOUT = "-"

format_option = click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="Write the rows of the run to one file.",
)
output_option = click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="File to write; the errors of openai-batch go to FILE with .errors before its suffix. "
    "Default: stdout, for jsonl and csv.",
)
order_option = click.option(
    "--order",
    type=click.Choice(ORDERS),
    help="With --format: order of the rows, of the data set or as they have ended. "
    f"[default: {ORDERS[0]}]",
)
all_columns_option = click.option(
    "--all-columns", is_flag=True, help="Write all columns, the common ones first."
)


def export(
    store: Results,
    run: str,
    form: Format,
    output: str | None,
    *,
    order: Order | None = None,
    all_columns: bool = False,
    quiet: bool,
) -> None:
    """Write a run to a file, and say on stderr what was written; or print it."""
    from jobs.results.export.write import export_columns, text_parts, write_export

    order = order or ORDERS[0]
    if output is None or output == STDOUT:
        if form not in TEXT_FORMATS:
            raise click.UsageError(f"--format {form} needs a file: add -o FILE")
        columns = export_columns(every=all_columns)
        with interrupts_raise():
            for text, _ in text_parts(store, run, form, columns, order):
                echo(text, nl=False)
        return
    with interrupts_raise():
        files = write_export(store, run, form, Path(output), every=all_columns, order=order)
    for file in () if quiet else files:
        echo(f"{file.path}: {counted(file.rows, 'row')}", err=True)
