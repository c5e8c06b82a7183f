"""`chatjobs results query`: SQL over the rows and scores of a run."""

from __future__ import annotations

import atexit
import gc
import math
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import click

from jobs.cli.failures import WrongInput
from jobs.cli.interrupts import interrupts_raise
from jobs.cli.options import json_option, results_option
from jobs.cli.output import echo, print_json
from jobs.cli.runs import open_results
from jobs.cli.table import Column, free_text, number, print_table
from jobs.results.export.cells import object_text
from jobs.sizes import counted

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from jobs import Results

BATCH_ROWS = 1000
MAX_ROWS = 1000  # of a table, which is in memory
# The query gets at the tables of the run, and at nothing else.
SETTINGS = (
    "enable_external_access = false",
    "python_enable_replacements = false",
    "autoload_known_extensions = false",
    "autoinstall_known_extensions = false",
    "lock_configuration = true",
)


@click.command(short_help="Run SQL over the tables samples and scores of a run.")
@click.argument("sql")
@click.argument("run")
@json_option
@results_option
def query(sql: str, run: str, as_json: bool, results: str) -> None:
    """Run a query of SQL over the tables samples and scores of RUN.

    \b
    chatjobs results query "select status, count(*) from samples group by 1" RUN
    chatjobs results query "select metric, avg(value) from scores group by 1" RUN

    The query reads no other files. It needs the package duckdb.
    """
    store = open_results(results)
    if sql in store.runs():
        raise click.UsageError(
            f'the query comes before the run: chatjobs results query "select …" {sql}'
        )
    store.path(run)  # raises if there is no such run
    with interrupts_raise(), _database(store, run) as database:
        names, rows = _answer(database, sql)
        if as_json:
            for row in rows:
                print_json(dict(zip(names, row, strict=True)))
        else:
            _print_rows(names, rows)


def _database(store: Results, run: str) -> DuckDBPyConnection:
    """A database in memory with the tables of a run. Raises WrongInput without duckdb."""
    from jobs.install import command_for

    try:
        import duckdb
    except ModuleNotFoundError:
        raise WrongInput(
            f"results query needs the package duckdb: {command_for('query')}"
        ) from None
    # It writes about every object that is left at exit, so garbage is searched for (jobs/cli).
    atexit.unregister(gc.freeze)
    database = duckdb.connect(":memory:")
    database.register("samples", store.dataset(run))
    database.register("scores", store.scores(run))
    for setting in SETTINGS:
        database.execute(f"set {setting}")
    return database


def _answer(database: DuckDBPyConnection, sql: str) -> tuple[list[str], Iterator[list[Any]]]:
    """The names of the columns, and the rows as they are computed. Raises WrongInput for a query
    that fails."""
    import duckdb

    try:
        kinds = [one.type for one in database.extract_statements(sql)]
        if kinds != [duckdb.StatementType.SELECT]:
            raise WrongInput("the query is not one select statement")
        reader = database.sql(sql).to_arrow_reader(BATCH_ROWS)
    except duckdb.Error as error:
        raise _failure(error) from None
    return reader.schema.names, _rows(reader)


def _rows(reader: Any) -> Iterator[list[Any]]:
    import pyarrow as pa

    try:
        for batch in reader:
            yield from (list(row) for row in zip(*map(_values, batch.columns), strict=True))
    except (pa.ArrowException, OSError) as error:  # such as a division in a later row
        raise _failure(error) from None


def _values(column: Any) -> list[Any]:
    return [_plain(one) for one in column.to_pylist()]


def _plain(value: Any) -> Any:
    """A value that JSON has, or a time; null for a number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, str | int | date):
        return value
    return str(value)


def _failure(error: Exception) -> WrongInput:
    """The first lines of duckdb's message, which name the error and its place."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return WrongInput(f"the query fails: {'; '.join(lines[:3])}")


def _shown(value: Any) -> Any:
    """A value in a table; lists and objects are JSON, as in exported CSV."""
    if isinstance(value, dict | list):
        return object_text(value)
    return "" if value is None else value


def _print_rows(names: list[str], rows: Iterator[list[Any]]) -> None:
    shown: list[list[Any]] = []
    more = False
    for row in rows:
        if len(shown) == MAX_ROWS:
            more = True
            break
        shown.append(row)
    columns: list[Column | str] = []
    for index, name in enumerate(names):
        values = [row[index] for row in shown if row[index] is not None]
        numeric = values and all(isinstance(one, int | float) for one in values)
        last = index == len(names) - 1
        columns.append(number(name) if numeric else free_text(name) if last else name)
    print_table(columns, [[_shown(one) for one in row] for row in shown], fit=True)
    if more:
        echo(f"the first {counted(MAX_ROWS, 'row')}: --json prints all", err=True)
