"""`chatjobs bench`: send a load to a model, and print its throughput and its latencies."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.cli.failures import Failure
from jobs.cli.options import (
    client,
    json_option,
    quiet_option,
    redis_option,
    results_option,
)
from jobs.cli.output import echo, print_json
from jobs.sizes import counted

if TYPE_CHECKING:
    from jobs import ChatRequest
    from jobs.cli.benchmark.figures import Timeline
    from jobs.cli.benchmark.load import CountTokens, Load

SERVED_ONLY = ("redis_url", "results")  # parameters that --local does not take


def _check_rate(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if not value > 0:
        raise click.BadParameter(f"{value:g} is not a rate above 0, such as 2.5 or inf")
    return value


@click.command()
@click.option("-m", "--model", required=True, metavar="M", help="Model that answers.")
@click.option(
    "--local",
    is_flag=True,
    help="Load the model in this process, as chatjobs chat --local does, and measure it without "
    "Redis and without a worker.",
)
@click.option(
    "--num-prompts",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    metavar="N",
    help="Number of requests; of a data set, its first rows.",
)
@click.option(
    "--input-len",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    metavar="N",
    help="Tokens of each prompt, about, with those of the chat template: random words.",
)
@click.option(
    "--output-len",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens of each answer, which then ignores the end-of-sequence token. [default: 128; with "
    "--dataset as its rows say]",
)
@click.option(
    "--dataset",
    type=click.Path(exists=True, path_type=Path),
    metavar="FILE",
    help="Requests of a data set, as chatjobs run reads it, instead of random words.",
)
@click.option(
    "--request-rate",
    type=float,
    callback=_check_rate,
    default=math.inf,
    show_default=True,
    metavar="R",
    help="Requests per second, as a Poisson process; inf sends all at once.",
)
@click.option(
    "--max-concurrency",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most requests in flight: another one is sent when one ends. [default: no limit]",
)
@click.option(
    "--seed", default=0, show_default=True, metavar="N", help="Seed of the words and arrivals."
)
@json_option
@quiet_option
@results_option
@redis_option
def bench(
    model: str,
    local: bool,
    num_prompts: int,
    input_len: int,
    output_len: int | None,
    dataset: Path | None,
    request_rate: float,
    max_concurrency: int | None,
    seed: int,
    as_json: bool,
    quiet: bool,
    results: str,
    redis_url: str,
) -> None:
    """Measure throughput and latencies of a model under a load.

    The requests go through the queue to the workers that serve the model, and their token streams
    are followed; with --local, to an engine in this process. A first request waits for a worker, if
    none runs, and is not measured. The figures are named as by vllm bench serve. Jobs and rows of
    the benchmark are removed at its end. Exit code 1 if a request has failed.
    """
    from jobs import Results
    from jobs.cli.benchmark.figures import figures_of
    from jobs.cli.benchmark.load import Load, due_times, from_data_set, synthetic
    from jobs.cli.dialogue import load_local

    _check_options(local, dataset)
    answer_len = 128 if output_len is None and dataset is None else output_len
    given: list[ChatRequest] | None = None
    if dataset is not None:  # a wrong one is refused before a model is loaded
        given = from_data_set(dataset, model, num_prompts, answer_len)

    def load_of(name: str, count_tokens: CountTokens) -> Load:
        """The load; a request has been run when this returns."""
        if given is None:
            assert answer_len is not None
            requests = synthetic(name, num_prompts, input_len, answer_len, seed, count_tokens)
        else:
            requests = [one.model_copy(update={"model": name}) for one in given]
            count_tokens(requests[0])
        gc.freeze()  # a full collection would look at all that was imported, again and again
        return Load(requests, due_times(len(requests), request_rate, seed), max_concurrency)

    if local:
        loaded = load_local(model, quiet=quiet)
        load = load_of(loaded.name, loaded.count_tokens)
        timelines = _served(load, quiet, lambda ended, _: loaded.serve(load, ended))
    else:
        from jobs.cli.benchmark.queue import QueueBench

        with client(redis_url, "measure in this process with --local", quiet=quiet) as connected:
            queue = QueueBench(connected, redis_url, Results(results), model, quiet=quiet)
            queue.check()
            with queue.cleaned():
                load = load_of(model, queue.count_tokens)
                timelines = _served(load, quiet, lambda ended, note: queue.serve(load, ended, note))
    facts: dict[str, Any] = {
        "model": model,
        "local": local,
        "dataset": None if dataset is None else str(dataset),
        "num_prompts": len(load.requests),
        "input_len": input_len if dataset is None else None,
        "output_len": answer_len,
        "request_rate": None if math.isinf(request_rate) else request_rate,
        "max_concurrency": max_concurrency,
        "seed": seed,
    }
    found = figures_of(timelines)
    if as_json:
        print_json(facts | found)
    elif found["completed"]:
        _print(facts, found)
    if found["failed"]:
        kinds = ", ".join(f"{code} {count:,}" for code, count in found["errors"].items())
        of_all = counted(len(timelines), "request")
        raise Failure(f"{found['failed']:,} of {of_all} failed ({kinds})")


def _check_options(local: bool, dataset: Path | None) -> None:
    """Refuse options that the load does not take."""
    context = click.get_current_context()

    def is_given(name: str) -> bool:
        return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE

    if local and any(map(is_given, SERVED_ONLY)):
        option = "--redis" if is_given("redis_url") else "--results"
        raise click.UsageError(
            f"{option} is for a worker's answers, and --local measures this process: give one of "
            "them"
        )
    if dataset is not None and is_given("input_len"):
        raise click.UsageError("--input-len is for random words: omit it with --dataset")


def _served(
    load: Load,
    quiet: bool,
    serve: Callable[[Callable[[], None], Callable[[str], None]], list[Timeline]],
) -> list[Timeline]:
    """Serve a load, with a progress bar."""
    from jobs.cli.progress import RowProgress

    total, done = len(load.requests), 0
    with RowProgress(total, quiet=quiet) as progress:

        def ended() -> None:
            nonlocal done
            done += 1
            progress.update(done, 0)

        return serve(ended, progress.note)


def _print(facts: dict[str, Any], found: dict[str, Any]) -> None:
    from jobs.cli.benchmark.figures import LATENCIES
    from jobs.cli.table import number, print_table

    for name, text in _lines(facts, found):
        echo(f"{name:<34}{text}")
    echo()
    columns = ("mean", "median", "p90", "p99")
    rows: list[Sequence[str]] = []
    for name in LATENCIES:
        values = [found[f"{column}_{name}_ms"] for column in columns]
        rows.append([name.upper(), *("" if one is None else f"{one:,.2f}" for one in values)])
    print_table(["ms", *(number(column) for column in columns)], rows)


def _lines(facts: dict[str, Any], found: dict[str, Any]) -> list[tuple[str, str]]:
    """The load and its throughput, one fact each."""
    rate, most = facts["request_rate"], facts["max_concurrency"]
    per_chunk = found["tokens_per_chunk"]
    if facts["dataset"] is None:
        prompts = f"random words, about {facts['input_len']} tokens"
    else:
        prompts = facts["dataset"]
    answers = "as the rows say" if facts["output_len"] is None else f"{facts['output_len']} tokens"
    return [
        ("Model", facts["model"]),
        ("Served by", "this process" if facts["local"] else "workers, through the queue"),
        ("Prompts", prompts),
        ("Answers", answers),
        ("Request rate (req/s)", "inf" if rate is None else f"{rate:g}, Poisson"),
        ("Maximum request concurrency", "no limit" if most is None else str(most)),
        ("Seed", str(facts["seed"])),
        ("Successful requests", f"{found['completed']:,}"),
        ("Failed requests", f"{found['failed']:,}"),
        ("Benchmark duration (s)", f"{found['duration']:,.2f}"),
        ("Total input tokens", f"{found['total_input_tokens']:,}"),
        ("Total generated tokens", f"{found['total_output_tokens']:,}"),
        ("Request throughput (req/s)", f"{found['request_throughput']:,.2f}"),
        ("Output token throughput (tok/s)", f"{found['output_throughput']:,.2f}"),
        ("Total token throughput (tok/s)", f"{found['total_token_throughput']:,.2f}"),
        ("Peak concurrent requests", f"{found['max_concurrent_requests']:,}"),
        ("Tokens per chunk", "" if per_chunk is None else f"{per_chunk:.2f}"),
    ]
