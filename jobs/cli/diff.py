"""`chatjobs diff`: compares the scores of two runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from jobs.cli.figures import by_option, group_text, seed_option
from jobs.cli.interrupts import interrupts_raise
from jobs.cli.options import json_option, quiet_option, results_option
from jobs.cli.output import echo, print_json
from jobs.cli.runs import open_results
from jobs.cli.table import Column, free_text, number, print_table
from jobs.sizes import counted, figure_text, interval_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.scores.compare import Delta, Flip, Pairs

SHOWN_ROWS = 10


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option(
    "-m",
    "--metric",
    "metrics",
    multiple=True,
    metavar="METRIC",
    help="A metric that both runs are scored by; may be repeated. Default: all of them.",
)
@by_option
@seed_option
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    metavar="N",
    show_default=f"{SHOWN_ROWS}, all with --json",
    help="Rows that are printed of those with another value.",
)
@json_option
@quiet_option
@results_option
def diff(
    first: str,
    second: str,
    metrics: tuple[str, ...],
    by: tuple[str, ...],
    seed: int,
    rows: int | None,
    as_json: bool,
    quiet: bool,
    results: str,
) -> None:
    """Compare the scores of the runs A and B of one data set.

    For each metric: the difference with its confidence interval, how many rows rose and fell, and
    McNemar's exact p-value; then the rows whose value differs. chatjobs score makes the scores.
    """
    from jobs.results.model_versions import mixture_sentence, read_answers
    from jobs.scores.compare import check_data_set, common_specs, deltas, flips, read_pairs
    from jobs.scores.freshness import is_stale, samples_digest, stale_sentence
    from jobs.scores.samples import read_groups
    from jobs.scores.spec import parse_spec

    store, runs = open_results(results), (first, second)
    for run in runs:
        store.path(run)  # raises if there is no such run
    limit = rows if rows is not None or as_json else SHOWN_ROWS
    with interrupts_raise():
        specs = [parse_spec(text) for text in dict.fromkeys(metrics)]
        groups = read_groups(store, first, by) if by else None
        pairs = [read_pairs(store, runs, one) for one in specs or common_specs(store, runs)]
        flipped: list[Flip] = []
        for one in pairs:
            check_data_set(store, runs, one)
            left = None if limit is None else limit - len(flipped)
            flipped += flips(store, runs, one, left)
        found = [delta for one in pairs for delta in deltas(one, groups, seed)]
        digests = [samples_digest(store, run) for run in runs]
        answers = [read_answers(store.dataset(run)) for run in runs]
    if not quiet:
        for run, found_in in zip(runs, answers, strict=True):
            if sentence := mixture_sentence(run, found_in):
                echo(sentence, err=True)
        for one in pairs:
            for run, digest in zip(runs, digests, strict=True):
                if is_stale(store, run, one.spec.text, digest):
                    echo(stale_sentence(run, one.spec.text), err=True)
    if as_json:
        for delta in found:
            print_json(_delta_facts(runs, delta))
        for flip in flipped:
            print_json(_flip_facts(runs, flip))
        return
    _print_deltas(runs, found, by)
    _print_flips(flipped)
    if not quiet:
        _print_rest(runs, pairs, sum(len(one.flipped) for one in pairs) - len(flipped))


def _delta_facts(runs: tuple[str, str], one: Delta) -> dict[str, Any]:
    return {
        "runs": runs,
        "metric": one.metric,
        "by": one.group,
        "rows": one.rows,
        "values": (one.first, one.second),
        "delta": one.delta,
        "low": one.interval and one.interval.low,
        "high": one.interval and one.interval.high,
        "rose": one.rose,
        "fell": one.fell,
        "p_value": one.p_value,
    }


def _flip_facts(runs: tuple[str, str], one: Flip) -> dict[str, Any]:
    return {
        "runs": runs,
        "metric": one.metric,
        "row_index": one.row_index,
        "repeat_index": one.repeat_index,
        "choice_index": one.choice_index,
        "custom_id": one.custom_id,
        "target": one.target,
        "values": one.values,
        "texts": one.texts,
    }


def _print_deltas(runs: tuple[str, str], found: Sequence[Delta], by: Sequence[str]) -> None:
    columns: list[Column | str] = ["metric", *by, number("A"), number("B"), number("B - A")]
    columns += ["95% interval", number("rows"), number("rose"), number("fell"), number("p")]
    print_table(
        columns,
        [
            [
                one.metric,
                *(group_text(one.group, name) for name in by),
                figure_text(one.first),
                figure_text(one.second),
                figure_text(one.delta),
                interval_text(one.interval),
                one.rows,
                one.rose,
                one.fell,
                "" if one.p_value is None else f"{one.p_value:.2g}",
            ]
            for one in found
        ],
    )


def _print_flips(flipped: Sequence[Flip]) -> None:
    if not flipped:
        return
    echo()
    print_table(
        [number("row"), "metric", number("A"), number("B"), free_text("target: A | B")],
        [
            [
                one.row_index if one.custom_id is None else one.custom_id,
                one.metric,
                f"{one.values[0]:.4g}",
                f"{one.values[1]:.4g}",
                f"{one.target or ''}: {one.texts[0] or ''} | {one.texts[1] or ''}",
            ]
            for one in flipped
        ],
    )


def _print_rest(runs: tuple[str, str], pairs: Sequence[Pairs], hidden: int) -> None:
    if hidden:
        echo(f"{counted(hidden, 'more row')} with another value: --rows N prints them", err=True)
    for one in pairs:
        for run, count in zip(runs, one.alone, strict=True):
            if count:
                echo(
                    f"{one.spec.text}: {counted(count, 'row')} of {run} without a value in the "
                    "other run",
                    err=True,
                )
