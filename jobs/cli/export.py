"""`chatjobs results RUN --format F`: the rows of a run as one file, or on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs.cli.interrupts import interrupts_raise
from jobs.cli.output import echo
from jobs.results.export.formats import FORMATS, TEXT_FORMATS, Format
from jobs.sizes import counted

if TYPE_CHECKING:
    from jobs import Results

STDOUT = "-"

format_option = click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="Write the rows of RUN, in the order of the data set, to one file.",
)
output_option = click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="File to write; the errors of openai-batch go to FILE with .errors before its suffix. "
    "Default: stdout, for jsonl and csv.",
)
all_columns_option = click.option(
    "--all-columns", is_flag=True, help="Write all columns, the common ones first."
)


def export(
    store: Results, run: str, form: Format, output: str | None, *, all_columns: bool, quiet: bool
) -> None:
    """Write a run to a file, and say on stderr what was written; or print it."""
    from jobs.results.export.write import export_columns, text_parts, write_export

    if output is None or output == STDOUT:
        if form not in TEXT_FORMATS:
            raise click.UsageError(f"--format {form} needs a file: add -o FILE")
        with interrupts_raise():
            for text, _ in text_parts(store, run, form, export_columns(every=all_columns)):
                echo(text, nl=False)
        return
    with interrupts_raise():
        files = write_export(store, run, form, Path(output), every=all_columns)
    for file in () if quiet else files:
        echo(f"{file.path}: {counted(file.rows, 'row')}", err=True)
