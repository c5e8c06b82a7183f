"""`chatjobs results`: runs on disk, and what one of them holds."""

from __future__ import annotations

import click

from jobs.cli.options import json_option, results_option


@click.command()
@click.argument("run", required=False)
@json_option
@results_option
def results(run: str | None, as_json: bool, results: str) -> None:
    """List the runs, or show what RUN holds. With --json: its rows, one JSON object per line."""
