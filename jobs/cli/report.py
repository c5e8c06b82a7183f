"""`chatjobs report`: one page about runs: scores, speed, errors, prompts and configuration."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import click

from jobs.cli.failures import WrongInput
from jobs.cli.figures import by_option, seed_option
from jobs.cli.interrupts import interrupts_raise
from jobs.cli.options import json_option, quiet_option, results_option
from jobs.cli.output import echo, print_json
from jobs.cli.runs import open_results
from jobs.sizes import counted, size_text

DEFAULT_FILE = "report.html"


def _parse_price(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    try:
        price = None if value is None else float(value)
    except ValueError:
        price = math.nan
    if price is not None and not 0 <= price < math.inf:
        raise click.BadParameter(f"{value!r} is not a price, such as 2.5")
    return price


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    default=DEFAULT_FILE,
    show_default=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="HTML file to write; replaced if it is a report.",
)
@by_option
@click.option(
    "--price-per-hour",
    callback=_parse_price,
    metavar="P",
    help="Price of a worker's hour, in any currency: the page has the price of 1,000 rows.",
)
@seed_option
@json_option
@quiet_option
@results_option
def report(
    runs: tuple[str, ...],
    output: Path,
    by: tuple[str, ...],
    price_per_hour: float | None,
    seed: int,
    as_json: bool,
    quiet: bool,
    results: str,
) -> None:
    """Write a page about the runs RUN..., beside each other, to one HTML file.

    It has the scores that chatjobs score has written with their confidence intervals, lengths,
    latencies and throughput, the slowest and the failed rows, the first prompts, the configuration
    and an audit of the files. It has no scripts and loads nothing. It needs the packages altair
    and vl-convert-python.
    """
    _check_packages()
    from jobs.report.contents import MAX_RUNS, read_contents
    from jobs.report.page import check_page, render
    from jobs.results.files import read_again
    from jobs.results.output_file import replaced

    names = list(dict.fromkeys(runs))
    if len(names) > MAX_RUNS:
        raise click.UsageError(f"a report has at most {MAX_RUNS} runs, and {len(names)} are given")
    store = open_results(results)
    check_page(output)
    with interrupts_raise():
        contents = read_again(
            lambda: read_contents(store, names, by, price_per_hour=price_per_hour, seed=seed)
        )
        text = render(contents)
        with replaced(output) as file:
            file.write(text)
    rows = sum(one.rows for one in contents.runs)
    size = len(text.encode())
    if as_json:
        print_json({"file": str(output), "runs": names, "rows": rows, "bytes": size})
    elif not quiet:
        what = f"{counted(len(names), 'run')}, {counted(rows, 'row')}, {size_text(size)}"
        echo(f"{output}: {what}", err=True)


def _check_packages() -> None:
    """Raise WrongInput without the packages of the extra."""
    from jobs.install import command_for

    for name in ("altair", "jinja2", "vl_convert"):
        if find_spec(name) is None:
            raise WrongInput(f"report needs the package {name}: {command_for('report')}")
