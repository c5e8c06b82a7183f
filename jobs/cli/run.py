"""`chatjobs run`: a data set in, a run of rows in Parquet out; the same command again goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.cli.export import export, format_option, order_option
from jobs.cli.failures import Failure, WrongInput
from jobs.cli.field_options import fields_option
from jobs.cli.map_option import map_option
from jobs.cli.options import (
    check_run,
    client,
    json_option,
    quiet_option,
    redis_option,
    results_option,
)
from jobs.cli.output import echo, print_json
from jobs.cli.run_watcher import FIRST_FAILURES, check_all_score, check_folder
from jobs.cli.watched_run import WINDOW_ROWS, WatchedRun
from jobs.data_sets.modes import MODES, SCORE_MODES
from jobs.results.export.formats import SUFFIXES, Format, Order
from jobs.sizes import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs import Client, Results
    from jobs.data_sets.data_set import Columns, DataSet
    from jobs.runs.audit import Audit


def _parse_examples(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[Path, int] | None:
    if value is None:
        return None
    name, colon, count = value.rpartition(":")
    if not colon or not name or not count.isdecimal() or int(count) < 1:
        raise click.BadParameter(f"{value!r} is not FILE:N, such as train.jsonl:5")
    if not Path(name).is_file():
        raise click.BadParameter(f"no file {name!r}")
    return Path(name), int(count)


def _check_seed(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    if value is not None and not -(2**63) <= value < 2**63:
        raise click.BadParameter(f"{value} is not an integer of 64 bits")
    return value


def _option_fields(ctx: click.Context) -> tuple[str, ...]:
    from jobs.data_sets.fields import request_fields
    from jobs.data_sets.score_items import option_fields

    mode = ctx.params["mode"]
    return option_fields(mode) if mode in SCORE_MODES else request_fields()


@click.command()
@click.argument("dataset", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default=MODES[0],
    is_eager=True,  # before the options whose values depend on it
    show_default=True,
    help="chat and completion generate answers, completion without the model's chat template. "
    "loglikelihood and choice score continuations of prompts, perplexity scores texts.",
)
@click.option(
    "-m", "--model", metavar="M", help="Model of all requests, instead of the model in each row."
)
@click.option(
    "--run", "run_id", metavar="ID", callback=check_run, help="Run. [default: <dataset>-<model>]"
)
@click.option("--split", metavar="NAME", help="Split of a folder that has several.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N rows.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), metavar="N", help="Short for -o max_tokens=N."
)
@fields_option(
    {
        "model": "--model",
        "messages": "DATASET",
        "job": "chatjobs run",
        "seed": "--seed",
        "priority": "chatjobs run: rows of a run are bulk jobs",
        "apply_chat_template": "--mode completion",
        "delimiter": "--delimiter",
    },
    known=_option_fields,
)
@map_option
@click.option(
    "--keep",
    multiple=True,
    metavar="COLUMN",
    help="Column to write to the metadata of the results; repeatable, '*' keeps all.",
)
@click.option(
    "--template",
    "template_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Jinja template that makes the prompt of each row from its columns.",
)
@click.option(
    "--choices",
    "choices_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --mode choice: Jinja template that makes the choices of each row from its columns, "
    "one a line.",
)
@click.option(
    "--delimiter",
    metavar="TEXT",
    help="Between a prompt and the text that is scored behind it. [default: a space, unless the "
    "prompt ends or the text begins with white space]",
)
@click.option(
    "--few-shot",
    callback=_parse_examples,
    metavar="FILE:N",
    help="Examples before each prompt: the first N rows of FILE, with their targets as answers.",
)
@click.option(
    "--few-shot-by",
    metavar="COLUMN",
    help="With --few-shot: the first N rows of FILE that have the row's value in COLUMN.",
)
@click.option(
    "--seed",
    type=int,
    callback=_check_seed,
    metavar="N",
    help="Seed of the run: each row gets a seed of its own from it.",
)
@click.option(
    "--num-samples",
    type=click.IntRange(min=1),
    default=1,
    metavar="K",
    help="Answers to each row, as jobs of their own: column repeat_index. [default: 1]",
)
@click.option(
    "--retry-failed", is_flag=True, help="Run the rows again that have failed or were cancelled."
)
@click.option(
    "--max-error-rate",
    type=click.FloatRange(min=0, max=1),
    metavar="R",
    help="Stop when more than this part of the rows has failed, after at least "
    f"{FIRST_FAILURES} rows; exit code 0 if fewer have failed at the end. [default: go on, and "
    "exit code 1 if any has failed]",
)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    default=WINDOW_ROWS,
    show_default=True,
    metavar="N",
    help="Rows in Redis at once that have not ended.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Enqueue no row of the run: read the data set, run a pilot of some rows, and print what "
    "the run will take.",
)
@click.option(
    "--price-per-hour",
    type=click.FloatRange(min=0),
    metavar="P",
    help="With --dry-run: price of an hour of the workers, in any currency.",
)
@format_option
@click.option(
    "--output",
    metavar="FILE",
    help="With --format: file to write when the run is done; the errors of openai-batch go to FILE "
    "with .errors before its suffix. [default: <run> with the suffix of the format]",
)
@order_option
@json_option
@quiet_option
@results_option
@redis_option
def run(
    dataset: Path,
    mode: str,
    model: str | None,
    run_id: str | None,
    split: str | None,
    limit: int | None,
    max_tokens: int | None,
    fields: dict[str, Any],
    names: dict[str, str],
    keep: tuple[str, ...],
    template_file: Path | None,
    choices_file: Path | None,
    delimiter: str | None,
    few_shot: tuple[Path, int] | None,
    few_shot_by: str | None,
    seed: int | None,
    num_samples: int,
    retry_failed: bool,
    max_error_rate: float | None,
    window: int,
    dry_run: bool,
    price_per_hour: float | None,
    form: Format | None,
    output: str | None,
    order: Order | None,
    as_json: bool,
    quiet: bool,
    results: str,
    redis_url: str,
) -> None:
    """Run all rows of DATASET and wait until they are in Parquet, with one row for each.

    DATASET is a file as chatjobs submit takes it, or a folder of a Hugging Face data set. Columns
    named messages, prompt or text hold the request, question and answer the prompt and the expected
    answer, continuations, choices and text what is scored; others are named with --map. A row that
    is no request becomes a row with an error.

    The same command again goes on where it was, and does nothing for a run that is done. At the end
    the rows in the files are counted: exit code 1 if one is missing, there twice, or has failed. A
    run does not go on with another version of its model.
    """
    from jobs import Results
    from jobs.data_sets.conventions import with_conventions
    from jobs.data_sets.data_set import DataSet
    from jobs.data_sets.example_file import read_examples
    from jobs.data_sets.files import data_files, readable_again
    from jobs.data_sets.requests import Overrides
    from jobs.data_sets.row_templates import RowTemplate
    from jobs.errors import InvalidRequest

    if price_per_hour is not None and not dry_run:
        raise click.UsageError("--price-per-hour needs --dry-run")
    if form is None and (output is not None or order is not None):
        raise click.UsageError("--output and --order need --format")
    if few_shot is None and few_shot_by is not None:
        raise click.UsageError("--few-shot-by needs --few-shot FILE:N")
    if choices_file is not None and mode != "choice":
        raise click.UsageError("--choices needs --mode choice")
    if max_tokens is not None:
        if "max_tokens" in fields:
            raise click.UsageError("--max-tokens and -o max_tokens exclude each other: give one")
        fields = {**fields, "max_tokens": max_tokens}
    _check_mode(mode, delimiter, fields, seed, num_samples, few_shot)
    if mode == "completion":
        fields = {**fields, "apply_chat_template": False}
    name = run_id or _default_name(dataset, split, mode, model)
    overrides = Overrides(
        model,
        name,
        None,
        fields,
        keep,
        names=names,
        ignore_unknown=True,
        own_ids=True,
        mode=mode,
        delimiter=delimiter,
    )
    store = Results(results)
    try:
        with readable_again(dataset) as readable:  # which the source keeps open
            files = data_files(readable, split)
            file = None if form is None else _output(output, name, form, files)
            given, overrides = overrides, with_conventions(overrides, files)
            template = None
            if template_file is not None:
                template = RowTemplate(_read_text(template_file), overrides.names)
            choices = None
            if choices_file is not None:
                text = _read_text(choices_file)
                choices = RowTemplate(text, overrides.names, "template of choices")
            examples = None
            if few_shot is not None:
                examples = read_examples(*few_shot, few_shot_by, given, template)
            source = click.get_current_context().with_resource(
                DataSet(
                    files,
                    overrides,
                    limit=limit,
                    template=template,
                    choices=choices,
                    examples=examples,
                    seed=seed,
                    samples=num_samples,
                )
            )
        columns = source.check()
        content, count = source.content()
        configuration = source.configuration(content)
        if dry_run:
            from jobs.cli.dry_run import DryRun

            DryRun(
                store,
                name,
                source,
                configuration,
                count,
                unused=unused_text(columns),
                retry_failed=retry_failed,
                max_error_rate=max_error_rate,
                price_per_hour=price_per_hour,
                quiet=quiet,
            ).run(redis_url, as_json=as_json)
            return
        with client(redis_url, quiet=quiet) as connected:
            check_folder(connected, store)
            if mode in SCORE_MODES:
                check_all_score(connected, columns.models)
            called = _Run(
                connected,
                store,
                name,
                source,
                columns,
                configuration,
                count,
                quiet=quiet,
                max_error_rate=max_error_rate,
                window=window,
            )
            found = called.run(retry_failed=retry_failed, as_json=as_json)
        if form is not None and found.holds:
            export(store, name, form, file, order=order, quiet=quiet)
        called.check(found)
    except InvalidRequest as error:
        place = "" if error.param == "run" else f"{dataset}: "
        raise WrongInput(f"{place}{error.message}") from None


class _Run:
    """One call of the command: the run, and what the user sees of its audit."""

    def __init__(
        self,
        connected: Client,
        store: Results,
        name: str,
        source: DataSet,
        columns: Columns,
        configuration: dict[str, Any],
        count: int,
        *,
        quiet: bool,
        max_error_rate: float | None,
        window: int,
    ) -> None:
        from jobs.runs.data_set_run import DataSetRun

        self._store, self._name, self._columns = store, name, columns
        self._quiet, self._max_error_rate = quiet, max_error_rate
        self._run = DataSetRun(
            connected.redis, store, name, source, configuration, window=window, expected=count
        )
        self._watched = WatchedRun(
            self._run,
            connected,
            store,
            columns.models,
            count,
            quiet=quiet,
            max_error_rate=max_error_rate,
            unserved="" if configuration["model"] else "; --model M runs all rows with another one",
        )

    def run(self, *, retry_failed: bool, as_json: bool) -> Audit:
        """Print the audit when the run is done. Raises Interrupted, and Failure if it is stopped at
        a rate of errors."""
        from jobs.results.files import SAMPLES
        from jobs.results.model_versions import mixture_sentence
        from jobs.runs.retry import failed

        unused = unused_text(self._columns)
        note = f"columns that are not used: {unused}" if unused else ""
        found = self._watched.execute(failed if retry_failed else None, note)
        if as_json:
            verdict = {"holds": found.holds, "mixed": found.mixed}
            print_json({"run": self._name, **found.to_dict(), **verdict})
        else:
            echo(f"{self._name}: {found}")
        if found.mixed and not self._quiet:
            echo(mixture_sentence(self._name, found.versions), err=True)
        if not self._quiet and not as_json:
            if self._run.done_before >= found.rows:
                echo("nothing to do: all rows were done before", err=True)
            echo(f"rows: {self._store.path(self._name) / SAMPLES / '*.parquet'}", err=True)
        return found

    def check(self, found: Audit) -> None:
        """Raise Failure if the audit does not hold, or if rows have failed."""
        if not found.holds:
            raise Failure(f"the rows of run {self._name} are not those of the data set: {found}")
        if found.failed and not self._within_rate(found):
            errors = self._run.written.errors.most_common()
            kinds = ", ".join(f"{code} {count:,}" for code, count in errors)
            raise Failure(
                f"{found.failed:,} of {counted(found.rows, 'row')} failed ({kinds}): "
                f"chatjobs results {self._name} --json has the errors, and --retry-failed runs "
                "these rows again"
            )

    def _within_rate(self, found: Audit) -> bool:
        rate = self._max_error_rate
        return rate is not None and found.failed <= rate * found.rows


def unused_text(columns: Columns) -> str:
    """The columns that nothing uses, and how they are used; "" if there are none."""
    from jobs.data_sets.data_set import shown_columns

    if not columns.unused:
        return ""
    target = "" if "target" in columns.names else ", --map COLUMN=target compares answers with one"
    unused = shown_columns(columns.unused)
    return f"{unused} (--keep COLUMN writes one to the results{target})"


def _check_mode(
    mode: str,
    delimiter: str | None,
    fields: dict[str, Any],
    seed: int | None,
    samples: int,
    few_shot: tuple[Path, int] | None,
) -> None:
    """Refuse options that have no meaning in a mode."""
    if few_shot is not None and mode != "chat":
        raise click.UsageError(
            f"--few-shot makes conversations, and --mode {mode} takes texts: write the examples "
            "into the template of --template"
        )
    if mode in SCORE_MODES:
        given = {
            "--max-tokens": "max_tokens" in fields,
            "--seed": seed is not None,
            "--num-samples": samples > 1,
        }
        for option in (name for name, is_given in given.items() if is_given):
            raise click.UsageError(f"{option} is for answers, and --mode {mode} generates none")
    if delimiter is not None and mode not in ("loglikelihood", "choice"):
        raise click.UsageError(f"--mode {mode} puts nothing behind a prompt: omit --delimiter")


def _default_name(dataset: Path, split: str | None, mode: str, model: str | None) -> str:
    """The name of a run that is not named: the same for the same data set and model."""
    from jobs.data_sets.files import COMPRESSED, is_pipe
    from jobs.data_sets.files import SUFFIXES as DATA_SUFFIXES
    from jobs.keys import RUN_ID

    if is_pipe(dataset):
        raise click.UsageError(f"{dataset} is a pipe, whose run has no name: name it with --run")
    name = dataset.resolve().name
    for suffixes in (COMPRESSED, DATA_SUFFIXES) if dataset.is_file() else ():
        # Not all: squad-1.1.jsonl and squad-1.2.jsonl are two runs.
        name = next((name.removesuffix(one) for one in suffixes if name.endswith(one)), name)
    of_mode = "" if mode == MODES[0] else mode
    parts = [name, split or "", of_mode, (model or "").rstrip("/").rpartition("/")[2]]
    found = "-".join(re.sub(r"[^A-Za-z0-9_.-]+", "-", part) for part in parts if part)
    found = found.lstrip(".-")[:100]
    if not RUN_ID.fullmatch(found):
        raise click.UsageError("the data set has no name that a run can have: name it with --run")
    return found


def _output(output: str | None, run: str, form: Format, files: Sequence[Path]) -> str:
    """The file to write. Raises InvalidRequest if it can't be written, and for a file of the data
    set."""
    from jobs.results.export.write import errors_path
    from jobs.results.output_file import check_output

    path = Path(output or f"{run}{SUFFIXES[form]}")
    written = {path, errors_path(path)} if form == "openai-batch" else {path}
    if {one.resolve() for one in written} & {one.resolve() for one in files}:
        raise click.UsageError(f"--output {path} is a file of the data set: name another one")
    check_output(path)
    return str(path)


def _read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file} is not UTF-8 text: {error.reason}") from None
