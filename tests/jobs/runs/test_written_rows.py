"""The rows of a run in its files, whatever other programs have written there."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import Results
from jobs.errors import InvalidRequest
from jobs.results.files import BrokenFileWarning
from jobs.runs.audit import audit
from jobs.runs.row_set import PAGE_ROWS, RowSet
from jobs.runs.written_rows import WrittenRows


def write(folder: Path, *rows: int | None) -> Path:
    """A part of the run "r" with these row indexes. Returns the file."""
    file = folder / "r/samples/part-a.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "row_index": pa.array(rows, pa.int64()),
        "choice_index": pa.array([0] * len(rows), pa.int16()),
        "status": ["ok"] * len(rows),
    }
    pq.write_table(pa.table(columns), file)
    return file


def test_rows_that_the_run_can_not_have_take_no_memory(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, None, -1, 1_700_000_000_000, 2**62 - 1, 2**62)
    written = WrittenRows(Results(tmp_path), "r")
    tracemalloc.start()
    written.refresh()
    found = audit(Results(tmp_path), "r", 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10e6
    assert 0 in written.rows and 2 not in written.rows and -1 not in written.rows
    assert (found.rows, found.missing, found.twice, found.foreign) == (2, 0, 0, 5)


def test_a_set_of_rows_is_one_of_numbers() -> None:
    draw = random.Random(0)
    rows, numbers = RowSet(), set[int]()
    for _ in range(3000):
        number = draw.choice((draw.randrange(99), draw.randrange(5 * PAGE_ROWS)))
        if draw.random() < 0.3:
            rows.discard(number)
            numbers.discard(number)
        else:
            assert rows.add(number) == (number not in numbers)
            numbers.add(number)
    assert len(rows) == len(numbers)
    assert [n for n in range(6 * PAGE_ROWS) if n in rows] == sorted(numbers)


@pytest.mark.parametrize("count", [0, 7, PAGE_ROWS, 2 * PAGE_ROWS + 9])
def test_a_set_knows_if_it_has_all_rows_below_a_count(count: int) -> None:
    rows = RowSet()
    for number in range(count):
        rows.add(number)
    assert rows.has_all(count) and not rows.has_all(count + 1)
    if count:
        rows.discard(count // 2)
        assert not rows.has_all(count)


def test_a_file_that_can_not_be_read_is_named_until_it_is_gone(tmp_path: Path) -> None:
    file = write(tmp_path, 0)
    content = file.read_bytes()
    file.write_bytes(content[:-9])
    written = WrittenRows(Results(tmp_path), "r")
    written.refresh()
    with pytest.raises(
        InvalidRequest, match=r"part-a\.parquet can't be read \(.*\): restore it, or"
    ):
        written.check()
    file.unlink()
    written.refresh()
    written.check()
    file.write_bytes(content)
    assert written.refresh() == 1
    written.check()


def test_a_file_of_another_program_is_no_row_of_a_run(tmp_path: Path) -> None:
    """Also if it has columns of the same names."""
    file = write(tmp_path, 1)
    other = file.with_name("mine.parquet")
    results = Results(tmp_path)
    for columns, fact in (
        ({"x": [1]}, "no column 'row_index'"),
        ({**pq.read_table(file).to_pydict(), "row_index": ["0"]}, "'row_index' has the type str"),
    ):
        pq.write_table(pa.table(columns), other)
        written = WrittenRows(results, "r")
        written.refresh()
        assert 0 not in written.rows and 1 in written.rows
        with pytest.raises(InvalidRequest, match=rf"mine\.parquet can't be read \(.*{fact}"):
            written.check()
        found = audit(results, "r", 2)
        assert (found.rows, found.missing, found.broken, found.foreign) == (1, 1, 1, 0)
        with pytest.warns(BrokenFileWarning, match=fact):
            assert results.table("r", ["row_index"])["row_index"].to_pylist() == [1]


def test_a_file_that_another_program_has_rewritten_is_read(tmp_path: Path) -> None:
    file = write(tmp_path, 0, 1)
    table = pq.read_table(file)
    wide = table.set_column(2, "status", table["status"].cast(pa.large_string()))
    wide = wide.set_column(1, "choice_index", wide["choice_index"].cast(pa.int64()))
    pq.write_table(wide, file)
    assert WrittenRows(Results(tmp_path), "r").refresh() == 2
