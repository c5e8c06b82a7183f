"""The files of a run: how they are written, and that every reader can read them.

Each reader is imported by the test that uses it: most test processes need none.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from jobs import Results
from jobs.errors import InvalidRequest
from jobs.operations import rows_of
from jobs.results.files import (
    BrokenFileWarning,
    table_of,
    write_part,
    write_scores,
)
from jobs.results.outbox import decode, encode
from jobs.results.run_json import RunJson
from jobs.results.schema import SCHEMA, leaves
from tests.jobs.results.entries import error_entry, ok_entry


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """A run of two parts: one of full rows, one of errors with most columns null."""
    run = tmp_path / "r1"
    full = [row for i in range(20) for row in rows_of(ok_entry(i, f"a{i}", 2, logprobs=True))]
    write_part(run / "_tmp/a.parquet", run / "samples/part-a.parquet", table_of(full))
    bare = [row for i in range(20, 25) for row in rows_of(error_entry(i, f"b{i}"))]
    write_part(run / "_tmp/b.parquet", run / "samples/part-b.parquet", table_of(bare))
    RunJson({"run_id": "r1", "engine": "chatjobs"}).write(run)
    return Results(tmp_path)


def glob_of(results: Results) -> str:
    return str(results.path("r1") / "samples" / "*.parquet")


def test_results_reads_the_run_as_a_table(results):
    table = results.table("r1")
    assert table.num_rows == 45
    assert table.schema.equals(SCHEMA)
    keys = set(
        zip(*(table[name].to_pylist() for name in ("row_index", "choice_index")), strict=True)
    )
    assert len(keys) == 45
    assert results.table(run="r1", columns=["text", "status"]).column_names == ["text", "status"]
    errors = results.dataset("r1").to_table(filter=ds.field("status") == "error")
    assert errors.num_rows == 5


def test_files_of_a_version_that_knew_fewer_columns_are_read(results):
    """repeat_index is 0 there, and not null; the others are null."""
    added = ["repeat_index", "prompt", "continuation", "choices", "picked_index"]
    (part,) = [file for file in results.files("r1") if file.name == "part-a.parquet"]
    older = pq.read_table(part).drop_columns(added)
    pq.write_table(older, part)
    read = results.table("r1", ["row_index", *added])
    assert read.num_rows == 45
    assert set(read["repeat_index"].to_pylist()) == {0}
    assert read["choices"].null_count == 45
    first = results.dataset("r1").to_table(filter=ds.field("repeat_index") == 0)
    assert first.num_rows == 45 and first.schema.equals(SCHEMA)
    assert results.dataset("r1").count_rows(filter=ds.field("repeat_index") > 0) == 0


def test_a_broken_file_is_skipped_with_a_warning(results):
    samples = results.path("r1") / "samples"
    (samples / "part-c.parquet").write_bytes((samples / "part-b.parquet").read_bytes()[:-9])
    (samples / "part-d.parquet").write_bytes(b"")
    for read in (results.table, results.dataset):
        with pytest.warns(BrokenFileWarning) as caught:
            rows = read("r1").count_rows() if read == results.dataset else read("r1").num_rows
        assert rows == 45
        assert ["part-c" in str(w.message) for w in caught] == [True, False]
        assert {w.filename for w in caught} == {__file__}
    assert [file.name for file in results.broken("r1")] == ["part-c.parquet", "part-d.parquet"]


def test_duckdb_reads_it(results):
    import duckdb

    parts = glob_of(results)
    sums = duckdb.sql(
        f"select status, count(*), sum(len(token_logprobs)), max(messages[2].content), "
        f"max(top_logprobs[1][2].token), max(epoch(finished_at)) from '{parts}' "
        "group by 1 order by 1"
    ).fetchall()
    assert sums == [("error", 5, None, None, None, 5.0), ("ok", 40, 80, "2+3", "6", 103.5)]
    keys = duckdb.sql(
        f"select count(distinct (run_id, row_index, repeat_index, choice_index)) from '{parts}'"
    )
    assert keys.fetchall() == [(45,)]
    metadata = duckdb.sql(f"select key, value from parquet_kv_metadata('{parts}')").fetchall()
    assert (b"chatjobs.schema_version", b"1") in metadata


def test_polars_reads_it(results):
    import polars as pl

    for source in (glob_of(results), str(results.path("r1") / "samples")):
        frame = pl.read_parquet(source)
        assert frame.height == 45
        assert frame.schema["token_logprobs"] == pl.List(pl.Float32)
        assert frame.filter(pl.col("status") == "ok")["messages"][0][1]["content"] == "2+3"


def test_pandas_reads_it(results):
    import pandas as pd

    frame = pd.read_parquet(results.path("r1") / "samples")
    assert len(frame) == 45
    assert frame["queue_s"].notna().sum() == 40
    assert str(frame["finished_at"].dt.tz) == "UTC"
    assert frame.iloc[0]["messages"][1]["content"] == "2+3"


def test_hugging_face_reads_the_run_folder(results, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    data = datasets.load_dataset(str(results.path("r1")), split="train", cache_dir=tmp_path / "hf")
    assert len(data) == 45
    ok = next(row for row in data if row["status"] == "ok")
    assert ok["messages"][1]["content"] == "2+3"
    assert ok["token_logprobs"] == [-0.25, -0.5]
    assert ok["top_logprobs"][0][1]["token"] == "6"


def test_every_field_has_a_description_also_in_the_file(results):
    stored = pq.read_schema(results.path("r1") / "samples" / "part-a.parquet")
    assert stored.equals(SCHEMA)
    for field in stored:
        assert len(field.metadata[b"description"]) > 3, field.name


def test_no_column_has_a_type_that_some_reader_cannot_read():
    allowed = {"string", "bool", "timestamp[us, tz=UTC]", "float", "double"}
    allowed |= {"int16", "int32", "int64"}
    assert {str(kind) for kind in leaves().values()} <= allowed


def test_floats_are_byte_stream_split_and_the_rest_dictionary_encoded(results):
    file = pq.ParquetFile(results.path("r1") / "samples" / "part-a.parquet")
    group = file.metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert columns.keys() == leaves().keys()
    floats = columns["token_logprobs.list.element"]
    assert "BYTE_STREAM_SPLIT" in floats.encodings
    assert "RLE_DICTIONARY" not in floats.encodings
    assert "RLE_DICTIONARY" in columns["model_fingerprint"].encodings
    assert floats.compression == "ZSTD"
    assert floats.has_offset_index


def test_the_same_entries_make_the_same_file(tmp_path):
    for name in ("a", "b"):
        table = table_of(rows_of(ok_entry(logprobs=True)))
        write_part(tmp_path / "_tmp/x", tmp_path / name, table)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_reader_sees_only_complete_files_while_parts_are_written(tmp_path):
    run = tmp_path / "r1"
    table = table_of([row for i in range(200) for row in rows_of(ok_entry(i, f"a{i}"))])
    write_part(run / "_tmp/0", run / "samples/part-0.parquet", table)
    seen, stop = [], threading.Event()

    def read():
        while not (seen and stop.is_set()):
            seen.append(ds.dataset(run / "samples").count_rows())

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 12):
        write_part(run / f"_tmp/{number}", run / f"samples/part-{number}.parquet", table)
    stop.set()
    reader.join()
    assert seen
    assert {count % 200 for count in seen} == {0}
    assert os.listdir(run / "_tmp") == []


@pytest.mark.parametrize("fault", [None, errno.EPERM, errno.ENOTSUP])
def test_a_part_that_exists_is_kept(tmp_path, monkeypatch, fault):
    """Rows may have been removed from it since. Some file systems have no hard links."""
    names = tmp_path / "_tmp/x", tmp_path / "samples/part-a.parquet"

    def link(*_):
        raise OSError(fault, os.strerror(fault))

    if fault is not None:
        monkeypatch.setattr(os, "link", link)
    write_part(*names, table_of(rows_of(ok_entry())))
    write_part(*names, table_of([]))
    assert pq.read_table(names[1]).num_rows == 1
    assert os.listdir(names[0].parent) == []


def test_a_crash_before_the_rename_leaves_no_file_in_samples(tmp_path, monkeypatch):
    run = tmp_path / "r1"
    write_part(run / "_tmp/0", run / "samples/part-0.parquet", table_of(rows_of(ok_entry())))

    def crash(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", crash)
    with pytest.raises(KeyboardInterrupt):
        write_part(run / "_tmp/1", run / "samples/part-1.parquet", table_of(rows_of(ok_entry())))
    assert os.listdir(run / "samples") == ["part-0.parquet"]
    assert Results(tmp_path).table("r1").num_rows == 1


def test_an_unknown_run_is_refused_with_the_names_of_the_runs(results, tmp_path):
    with pytest.raises(InvalidRequest, match=r"no run 'nope' in .*; runs there: r1"):
        results.table("nope")
    with pytest.raises(ValueError, match="runs there: none"):
        Results(tmp_path / "nothing").path("r1")
    with pytest.raises(InvalidRequest):
        results.path("../r1")
    for name in ("r11", f"{tmp_path}/r1"):
        with pytest.raises(InvalidRequest, match=r"\(did you mean r1\?\)"):
            results.path(name)
    for number in range(30):
        (tmp_path / f"x{number}" / "samples").mkdir(parents=True)
    with pytest.raises(InvalidRequest, match=r"x25 and 11 more \(chatjobs results lists them"):
        results.path("nope")


def test_an_unknown_column_is_refused_with_the_names_of_the_columns(results):
    with pytest.raises(InvalidRequest, match="no column 'answer' in results; columns are: "):
        results.table("r1", columns=["answer"])


def test_a_run_without_rows_is_an_empty_table(tmp_path):
    RunJson({"run_id": "new", "engine": "chatjobs"}).write(tmp_path / "new")
    results = Results(tmp_path)
    assert results.runs() == ["new"]
    assert results.table("new").num_rows == 0
    assert results.table("new").schema.equals(SCHEMA)
    assert results.config("new") == {"run_id": "new", "engine": "chatjobs"}


def test_infinite_and_missing_logprobs_are_kept(tmp_path):
    entry = ok_entry(logprobs=True)
    entry["token_logprobs"] = [[-math.inf, -0.5]]
    table = table_of(rows_of(decode(encode(entry))))
    write_part(tmp_path / "_tmp/x", tmp_path / "x.parquet", table)
    read = pq.read_table(tmp_path / "x.parquet")
    assert read["token_logprobs"].to_pylist() == [[-math.inf, -0.5]]


def test_a_run_card_that_can_not_be_written_leaves_no_file_behind(tmp_path):
    """The recorder tries again every few seconds: each try must not take more of the disk."""
    (tmp_path / "r1" / "run.json").mkdir(parents=True)
    for _ in range(3):
        with pytest.raises(OSError):
            RunJson({}).write(tmp_path / "r1")
    assert os.listdir(tmp_path / "r1" / "_tmp") == []


def test_a_run_card_removes_what_a_killed_writer_left(tmp_path):
    for name in ("run.json.1", "README.md.2", "part-0.1.parquet"):
        write_part(tmp_path / "_tmp" / name, tmp_path / name, table_of([]))
        (tmp_path / name).replace(tmp_path / "_tmp" / name)
    RunJson({"run_id": "r"}).write(tmp_path)
    assert [path.name for path in (tmp_path / "_tmp").iterdir()] == ["part-0.1.parquet"]


def test_scores_remove_what_a_killed_writer_left_and_nothing_of_one_that_lives(tmp_path):
    RunJson({}).write(tmp_path / "r")
    for name in ("scores.killed", "scores.lives", "part-0.1.parquet"):
        (tmp_path / "r/_tmp" / name).touch()
    with (tmp_path / "r/_tmp/scores.lives").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        scores = write_scores(Results(tmp_path), "r", "exact", [])
        assert sorted(os.listdir(tmp_path / "r/_tmp")) == ["part-0.1.parquet", "scores.lives"]
        assert scores.is_file()

        def fails() -> Iterator[Any]:
            yield from ()
            assert len(list((tmp_path / "r/_tmp").glob("scores.*"))) == 2
            write_scores(Results(tmp_path), "r", "number", [])  # by another process: both live
            raise OSError(errno.ENOSPC, "no space")

        with pytest.raises(OSError, match=r"no space: .*scores/exact\.parquet"):
            write_scores(Results(tmp_path), "r", "exact", fails())
    assert sorted(os.listdir(tmp_path / "r/_tmp")) == ["part-0.1.parquet", "scores.lives"]


def test_a_writer_whose_file_another_one_removed_writes_it_again(tmp_path, monkeypatch):
    replace, others = Path.replace, iter((True, False, True, False))

    def replace_late(path, target):
        if next(others):
            path.unlink()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_late)
    RunJson({"run_id": "r"}).write(tmp_path)
    assert json.loads((tmp_path / "run.json").read_text()) == {"run_id": "r"}
    assert not list((tmp_path / "_tmp").iterdir())


def test_a_folder_that_this_user_may_not_read_hides_no_run() -> None:
    with TemporaryDirectory() as name:  # that of pytest is closed to other users
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "r1/samples").mkdir(parents=True)
        (folder / "backup").mkdir(mode=0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            with pytest.warns(BrokenFileWarning, match="backup is left out: no permission"):
                assert Results(folder).runs() == ["r1"]
        finally:
            os.seteuid(user)
