"""Result data sets on disk: writing the files of a run, and `Results`, which reads them.

    <results>/<run>/run.json                 run id, schema version, engine and versions
    <results>/<run>/README.md                data-set card, for load_dataset(<run>)
    <results>/<run>/samples/part-….parquet   complete files, all with schema.py's SCHEMA
    <results>/<run>/scores/….parquet         one file per metric, with scores.py's SCORES_SCHEMA
    <results>/<run>/_tmp/                    unfinished files

The recorder writes: `rows_of(entry)` converts an outbox entry to rows, `table_of(rows)` makes a
table of them, `write_part` writes it, once. `RunJson` of run_json.py reads and writes run.json and
writes README.md before it. `chatjobs score` writes with `write_scores`.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.disk import make_folder, sync_folder
from jobs.errors import invalid
from jobs.keys import RUN_ID
from jobs.results.rows import Row
from jobs.results.run_json import RUN_JSON, RunJson
from jobs.results.schema import SCHEMA, foreign_fault, leaves
from jobs.results.scores import (
    SAMPLES_DIGEST,
    SCORES,
    SCORES_SCHEMA,
    read_score_files,
    score_file,
)
from jobs.results.superseded import without_superseded
from jobs.results.unfinished import TEMPORARY, unfinished

if TYPE_CHECKING:
    import pyarrow.dataset as ds

T = TypeVar("T")

RESULTS_VARIABLE = "CHATJOBS_RESULTS"
DEFAULT_RESULTS = "results"

SAMPLES = "samples"
NAMED_RUNS = 20  # in a sentence about a run that is not there

COMPRESSION = "zstd"


def table_of(rows: Iterable[Row]) -> pa.Table:
    """A table of SCHEMA; columns missing in a row are null."""
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


def write_part(path_tmp: Path, path_final: Path, table: pa.Table) -> None:
    """Write a part atomically, see `write_tables`. One that exists stays as it is: another recorder
    has written it, and rows may have been removed from it since."""
    _write(path_tmp, path_final, [table], SCHEMA)
    _create(path_tmp, path_final)
    sync_folder(path_final.parent)


def _create(path_tmp: Path, path_final: Path) -> None:
    """Rename a file unless its new name is taken."""
    try:
        os.link(path_tmp, path_final)
    except FileExistsError:
        if not path_final.is_file():
            raise
    except OSError:  # a file system without hard links, or another recorder has removed path_tmp
        if not path_final.exists():
            path_tmp.replace(path_final)
    path_tmp.unlink(missing_ok=True)


def write_tables(
    path_tmp: Path, path_final: Path, tables: Iterable[pa.Table], schema: pa.Schema = SCHEMA
) -> None:
    """Write tables of `schema` to one file, which replaces `path_final`: that is complete and
    durable, or as before.

    Both paths must be in the same file system, and readers must not list the folder of `path_tmp`.
    Raises OSError.
    """
    _write(path_tmp, path_final, tables, schema)
    path_tmp.replace(path_final)
    sync_folder(path_final.parent)


def _write(path_tmp: Path, path_final: Path, tables: Iterable[pa.Table], schema: pa.Schema) -> None:
    """Write `path_tmp`, and make the folders of both."""
    floats = {path for path, kind in leaves(schema).items() if pa.types.is_floating(kind)}
    make_folder(path_tmp.parent)
    make_folder(path_final.parent)
    with path_tmp.open("wb") as file:
        with pq.ParquetWriter(
            file,
            schema,
            compression=COMPRESSION,
            use_dictionary=sorted(leaves(schema).keys() - floats),
            column_encoding={path: "BYTE_STREAM_SPLIT" for path in floats},
            write_page_index=True,
        ) as writer:
            for table in tables:
                writer.write_table(table)
        file.flush()
        os.fsync(file.fileno())


def write_scores(
    results: Results,
    run: str,
    metric: str,
    tables: Iterable[pa.Table],
    samples: str | None = None,
) -> Path:
    """Write the tables, which are SCORES_SCHEMA's, as the scores of a run by a metric, in place of
    those that are there. `samples`: digest of what was scored. Returns their file. If it raises,
    nothing has changed; an OSError names the file."""
    folder = results.path(run)
    file = score_file(folder, metric)
    digest = {} if samples is None else {SAMPLES_DIGEST: samples}
    schema = SCORES_SCHEMA.with_metadata({**SCORES_SCHEMA.metadata, **digest})
    try:
        with unfinished(folder / TEMPORARY, SCORES) as temporary:
            write_tables(temporary, file, tables, schema)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from None  # the disk is full
    return file


class BrokenFileWarning(UserWarning):
    """A Parquet file of a run, or a folder beside the runs, can't be read: its rows are missing in
    what was asked for."""


class Results:
    """Reads a folder of runs. `path` defaults to $CHATJOBS_RESULTS, then ./results."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(path or os.environ.get(RESULTS_VARIABLE) or DEFAULT_RESULTS)

    def runs(self) -> list[str]:
        """Names of the runs, sorted. Folders whose names no run can have are of other programs."""
        if not self.root.is_dir():
            return []
        return sorted(
            folder.name
            for folder in self.root.iterdir()
            if RUN_ID.fullmatch(folder.name) and _is_run(folder)
        )

    def path(self, run: str) -> Path:
        """The run's folder. Raises InvalidRequest if there is no such run."""
        if run not in self.runs():
            raise invalid(self._no_run(run), "run")
        return self.root / run

    def _no_run(self, run: str) -> str:
        runs = self.runs()
        near = difflib.get_close_matches(Path(run).name, runs, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        names = ", ".join(runs[:NAMED_RUNS]) or "none"
        more = len(runs) - NAMED_RUNS
        names += f" and {more} more (chatjobs results lists them)" if more > 0 else ""
        return f"no run {run!r} in {self.root.absolute()}{meant}; runs there: {names}"

    def config(self, run: str) -> dict[str, Any]:
        """Content of run.json: run_id, schema_version, engine, engine_version, torch_version, and
        what `chatjobs run` adds.

        {} if the file doesn't exist yet. Raises InvalidRequest if it can't be read.
        """
        return dict(RunJson.read(self.path(run)).content)

    # pyarrow has no types, and pyright reports unknown types in the caller's code, but not Any.

    def dataset(self, run: str) -> Any:
        """The run's rows as a pyarrow.dataset.Dataset, which selects and filters lazily.

        If a job has rows of several attempts, only those of the newest one. A file that
        can't be read is skipped with a BrokenFileWarning.
        """
        return read_again(lambda: self._dataset(run, stacklevel=5))

    def broken(self, run: str) -> dict[Path, str]:
        """The run's files that can't be read, because their footer is damaged or missing or another
        program has written them, and why. chatjobs itself writes whole files only."""
        return read_again(lambda: _check(self.files(run)))

    def table(self, run: str, columns: Sequence[str] | None = None) -> Any:
        """The run's rows as a pyarrow.Table, one per choice, in no particular order. `columns`:
        only these."""
        names = _known(columns, SCHEMA, "results")
        return read_again(lambda: self._dataset(run, stacklevel=5).to_table(columns=names))

    def scores(
        self,
        run: str,
        metrics: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
    ) -> Any:
        """The scores that `chatjobs score` has written, as a pyarrow.Table in long form: one row
        per choice and metric. `metrics`: only these, as they were written, such as "number:0.01".
        `columns`: only these.

        A run without scores has none. Raises InvalidRequest for a metric that the run has no
        scores by, and for a file that can't be read.
        """
        folder = self.path(run)
        names = _known(columns, SCORES_SCHEMA, "scores")
        if metrics is None:
            return read_score_files(sorted((folder / SCORES).glob("*.parquet")), names)
        files = [score_file(folder, metric) for metric in metrics]
        for metric, file in zip(metrics, files, strict=True):
            if not file.is_file():
                raise invalid(
                    f"run {run} has no scores by {metric}: chatjobs score {run} --metric "
                    f"'{metric}'",
                    "metric",
                )
        return read_score_files(files, names)

    def files(self, run: str) -> list[Path]:
        """The run's Parquet files, without those that `compact` has replaced."""
        folder = self.path(run)
        return without_superseded(_listed(folder), folder)

    def superseded(self, run: str) -> list[Path]:
        """The Parquet files that `compact` has replaced and that are there nevertheless: other
        readers of Parquet see their rows."""
        folder = self.path(run)
        listed = _listed(folder)
        return sorted({*listed}.difference(without_superseded(listed, folder)))

    def _dataset(self, run: str, stacklevel: int) -> ds.Dataset:
        import pyarrow.dataset as ds  # it imports pandas, which a worker need not wait for

        from jobs.results.latest import latest_attempts

        files = self.files(run)
        faults = _check(files)
        for file, reason in faults.items():
            warnings.warn(f"{file} is skipped: {reason}", BrokenFileWarning, stacklevel)
        whole = [file for file in files if file not in faults]
        if not whole:
            return ds.dataset(SCHEMA.empty_table())
        return latest_attempts(dataset_of(whole))


def read_again(read: Callable[[], T]) -> T:
    """Call a function that lists files and reads them, and call it again if `compact` has removed
    one in between."""
    try:
        return read()
    except FileNotFoundError:
        return read()


def dataset_of(files: list[Path]) -> ds.FileSystemDataset:
    """The rows of files. Rows of a version that knew no repeats have repeat_index 0, and null in
    each other column that their file lacks."""
    import pyarrow.compute as pc
    import pyarrow.dataset as ds
    from pyarrow.fs import LocalFileSystem

    form, system = ds.ParquetFileFormat(), LocalFileSystem()
    first = pc.field("repeat_index") == pa.scalar(0, pa.int32())
    fragments = [
        form.make_fragment(
            str(file),
            system,
            None if "repeat_index" in pq.read_schema(file).names else first,
        )
        for file in files
    ]
    return ds.FileSystemDataset(fragments, SCHEMA, form, system)


def _listed(folder: Path) -> list[Path]:
    return sorted((folder / SAMPLES).glob("*.parquet"))


def _known(columns: Sequence[str] | None, schema: pa.Schema, where: str) -> list[str] | None:
    """The names of columns; None for all. Raises InvalidRequest for one that a schema lacks."""
    names = None if columns is None else list(columns)
    absent = [name for name in names or () if name not in schema.names]
    if absent:
        raise invalid(
            f"no column {absent[0]!r} in {where}; columns are: {', '.join(schema.names)}",
            "columns",
        )
    return names


def _is_run(folder: Path) -> bool:
    """False with a BrokenFileWarning for a folder that this user may not read."""
    try:
        names = os.listdir(folder)
    except PermissionError:
        warnings.warn(f"{folder} is left out: no permission", BrokenFileWarning, stacklevel=2)
        return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (SAMPLES in names and (folder / SAMPLES).is_dir()) or (
        RUN_JSON in names and (folder / RUN_JSON).is_file()
    )


def _check(files: list[Path]) -> dict[Path, str]:
    """The files whose footer can't be read, or that other programs have written, and why."""
    faults = {}
    for file in files:
        try:
            fault = foreign_fault(pq.read_schema(file))
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, FileNotFoundError) and not file.is_symlink():
                raise  # it was listed, and `compact` has removed it since
            fault = " ".join(str(error).split())
        if fault is not None:
            faults[file] = fault
    return faults
