"""`chatjobs score`: scores the rows of a run by metrics, and prints their figures."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.cli.failures import Failure
from jobs.cli.figures import by_option, group_text, seed_option
from jobs.cli.interrupts import interrupts_raise
from jobs.cli.judge import judge_fields_option, score_by_judge
from jobs.cli.map_option import target_map_option
from jobs.cli.options import (
    Seconds,
    json_option,
    make_redis_option,
    quiet_option,
    results_option,
)
from jobs.cli.output import echo, print_json
from jobs.cli.runs import open_results
from jobs.cli.table import Column, number, print_table
from jobs.sizes import counted, figure_text, interval_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from jobs import Results
    from jobs.scores.scoring import Tally
    from jobs.scores.spec import Spec
    from jobs.scores.summary import Summary
    from jobs.scores.targets import Targets

GIB = 1 << 30


@click.command()
@click.argument("run")
@click.option(
    "-m",
    "--metric",
    "metrics",
    multiple=True,
    metavar="METRIC",
    help="exact[:case,...], contains[:case,...], number[:TOLERANCE], regex:PATTERN, "
    "choice[:sum|tokens|characters|bytes], json, json-schema[:FILE], bleu[:TOKENIZER], chrf, "
    "chrf++, edit[:case,...], math, perplexity[:bytes|words], pass@K:METRIC, "
    "judge:MODEL[:FILE.jinja], module:function or file.py:function; may be repeated. Without it, "
    "the figures of all metrics that the run is scored by are printed.",
)
@judge_fields_option
@click.option(
    "--target",
    "target_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File of rows (CSV, JSONL, Parquet) with the column target, and custom_id or row_index: "
    "its targets are compared with, instead of those of the run.",
)
@target_map_option
@by_option
@seed_option
@click.option(
    "--timeout",
    type=Seconds(min=0.001),
    default=10.0,
    show_default=True,
    metavar="S",
    help="Seconds of CPU time that a metric may take for a row.",
)
@click.option(
    "--memory",
    type=click.FloatRange(min=0.01),
    default=2.0,
    show_default=True,
    metavar="GIB",
    help="Memory that a metric may take.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1, max=256),
    metavar="N",
    show_default="processors, up to 8",
    help="Processes that score rows.",
)
@json_option
@quiet_option
@results_option
@make_redis_option("Redis server of the workers that run a judge.")
def score(
    run: str,
    metrics: tuple[str, ...],
    fields: dict[str, Any],
    target_file: Path | None,
    names: dict[str, str],
    by: tuple[str, ...],
    seed: int,
    timeout: float,
    memory: float,
    processes: int | None,
    as_json: bool,
    quiet: bool,
    results: str,
    redis_url: str,
) -> None:
    """Score the rows of RUN, without generating them again.

    The value of each row goes to the table RUN/scores. A metric that was scored before is replaced
    there. A row that a metric can't score has an error in the table, and the exit code is 1.

    judge:MODEL asks another model through its queues, and waits for its workers. -o sets fields of
    its requests. The same command again asks about new answers alone.
    """
    from jobs.scores.process import Limits
    from jobs.scores.samples import read_groups
    from jobs.scores.spec import JUDGE, parse_spec
    from jobs.scores.summary import summarise

    specs = _with_bases([parse_spec(text) for text in dict.fromkeys(metrics)])
    if fields and not any(spec.name == JUDGE for spec in specs):
        raise click.UsageError("-o needs a metric judge:MODEL")
    if target_file is not None and not specs:
        raise click.UsageError("--target needs a metric, such as --metric exact")
    if names and target_file is None:
        raise click.UsageError("--map needs --target FILE, whose columns it names")
    store = open_results(results)
    store.path(run)  # raises if there is no such run
    limits = Limits(timeout, round(memory * GIB))
    with interrupts_raise(), _targets(store, run, target_file, names) as targets:
        groups = read_groups(store, run, by) if by else None
        tallies = [
            score_by_judge(store, run, spec, fields, targets, redis_url, quiet=quiet)
            if spec.name == JUDGE
            else _scored(store, run, spec, limits, targets, processes, quiet)
            for spec in specs
        ]
        summaries = list(summarise(store, run, specs, groups, seed))
    if as_json:
        for one in summaries:
            print_json(_facts(run, one))
    else:
        _print_table(summaries, by)
    if not quiet:
        _print_mixture(store, run)
        _print_stale(run, summaries)
    _report(specs, tallies, quiet)


def _with_bases(specs: Sequence[Spec]) -> list[Spec]:
    """The metrics, each pass@k behind the one that it is made of."""
    from jobs.scores.spec import parse_spec

    found: dict[str, Spec] = {}
    for spec in specs:
        if spec.samples is not None:
            base = parse_spec(spec.argument or "")
            found.setdefault(base.text, base)
    plain = {spec.text: spec for spec in specs if spec.samples is None}
    return [*({**found, **plain}).values(), *(one for one in specs if one.samples is not None)]


@contextmanager
def _targets(
    store: Results, run: str, file: Path | None, names: Mapping[str, str]
) -> Iterator[Targets | None]:
    """The targets in a file, which has one for each row of the run."""
    from jobs.data_sets.target_file import TargetFile
    from jobs.results.files import read_again

    if file is None:
        yield None
        return
    with TargetFile(file, names) as targets:
        read_again(lambda: targets.check(store, run))
        yield targets


def _scored(
    store: Results,
    run: str,
    spec: Spec,
    limits: Any,
    targets: Targets | None,
    processes: int | None,
    quiet: bool,
) -> Tally:
    from jobs.cli.progress import RowProgress
    from jobs.results.files import read_again
    from jobs.scores.scoring import score_run

    with RowProgress(store.dataset(run).count_rows(), spec.text, quiet=quiet) as progress:
        return read_again(
            lambda: score_run(
                store,
                run,
                spec,
                limits,
                targets=targets,
                processes=processes,
                progress=lambda rows: progress.update(rows, 0),
            )
        )


def _facts(run: str, one: Summary) -> dict[str, Any]:
    figure = one.figure
    return {
        "run": run,
        "metric": one.metric,
        "by": one.group,
        "value": figure.value,
        "low": figure.interval and figure.interval.low,
        "high": figure.interval and figure.interval.high,
        "rows": figure.rows,
        "scored": figure.scored,
        "no_answer": figure.no_answer,
        "errors": figure.errors,
    }


def _print_table(summaries: Sequence[Summary], by: Sequence[str]) -> None:
    """One line per metric and group; a column that has zeros alone is left out."""
    no_answer = any(one.figure.no_answer for one in summaries)
    errors = any(one.figure.errors for one in summaries)
    columns: list[Column | str] = ["metric", *by, number("value"), "95% interval", number("rows")]
    columns += [number("no answer")] * no_answer + [number("errors")] * errors
    rows = []
    for one in summaries:
        figure = one.figure
        row = [one.metric, *(group_text(one.group, name) for name in by), figure_text(figure.value)]
        row += [interval_text(figure.interval), str(figure.scored)]
        row += [str(figure.no_answer)] * no_answer + [str(figure.errors)] * errors
        rows.append(row)
    print_table(columns, rows)


def _print_mixture(store: Results, run: str) -> None:
    from jobs.results.model_versions import mixture_sentence, read_answers

    if sentence := mixture_sentence(run, read_answers(store.dataset(run))):
        echo(sentence, err=True)


def _print_stale(run: str, summaries: Sequence[Summary]) -> None:
    from jobs.scores.freshness import stale_sentence

    for one in summaries:
        if one.is_stale and not one.group:
            echo(stale_sentence(run, one.metric), err=True)


def _report(specs: Sequence[Spec], tallies: Sequence[Tally], quiet: bool) -> None:
    """Say what was not scored. Raises Failure if a metric failed with a row."""
    unanswered = max((tally.no_answer for tally in tallies), default=0)
    if unanswered and not quiet:
        echo(f"{counted(unanswered, 'row')} without an answer: not scored", err=True)
    lines, failed = [], []
    for spec, tally in zip(specs, tallies, strict=True):
        if tally.failed:
            lines += [f"{spec.text}: {error}" for error in tally.errors]
            rest = tally.failed - len(tally.errors)
            lines += [f"{spec.text}: and {counted(rest, 'more row')}"] if rest else []
            failed.append(f"{tally.failed} of {counted(tally.rows, 'row')} by {spec.text}")
    if failed:
        raise Failure(f"not scored: {', '.join(failed)}", lines=lines)
