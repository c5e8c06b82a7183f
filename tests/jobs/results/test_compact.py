"""One file instead of many: each row is read once, whenever it stops."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from jobs import JobError, Results, keys
from jobs.cli import build
from jobs.results import compact as module
from jobs.results.compact import compact, finish_replacement, remove_rows
from jobs.store.producer_lease import LeaseLost, ProducerLease
from tests.jobs.results.test_latest import row, write


def numbers(results: Results) -> list[int]:
    return sorted(results.table("r")["row_index"].to_pylist())


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return write(tmp_path, *([row(3 * part + i, 1, "x") for i in range(3)] for part in range(4)))


def test_all_rows_are_in_one_file(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    before = results.table("r").sort_by("row_index")
    monkeypatch.setattr(module, "GROUP_ROWS", 5)
    assert compact(results, "r") == 4
    (file,) = (results.root / "r/samples").iterdir()
    assert pq.read_metadata(file).num_row_groups == 2
    assert results.table("r").sort_by("row_index").equals(before)
    assert compact(results, "r") == 0


def test_rows_of_older_attempts_are_dropped(tmp_path: Path) -> None:
    results = write(tmp_path, [row(0, 1, "old")], [row(0, 2, "new")])
    compact(results, "r")
    (file,) = (tmp_path / "r/samples").iterdir()
    assert pq.read_table(file)["text"].to_pylist() == ["new"]


@pytest.mark.parametrize("step", range(9))
def test_results_reads_each_row_once_whenever_compacting_stops(
    results: Results, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """It stops at one of its changes of the file system: renames and removals."""
    changes = []

    def stopping(change: Any) -> Any:
        def changed(*words: Any, **options: Any) -> Any:
            if len(changes) == step:
                raise KeyboardInterrupt
            changes.append(change.__name__)
            done = change(*words, **options)
            assert numbers(results) == list(range(12))
            return done

        return changed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stopping(Path.replace))
        patch.setattr(Path, "unlink", stopping(Path.unlink))
        try:
            compact(results, "r")
        except KeyboardInterrupt:
            assert step < 6
        else:
            assert step >= 6
    assert numbers(results) == list(range(12))
    compact(results, "r")
    assert numbers(results) == list(range(12))
    assert len(list((results.root / "r/samples").iterdir())) == 1


def test_nothing_changes_if_the_lease_is_lost_meanwhile(results: Results) -> None:
    before = {file: file.read_bytes() for file in results.files("r")}

    def lose() -> None:
        raise LeaseLost("r")

    with pytest.raises(LeaseLost):
        compact(results, "r", confirm=lose)
    assert {file: file.read_bytes() for file in (results.root / "r/samples").iterdir()} == before
    assert not list((results.root / "r/_tmp").iterdir())


def test_a_reader_lists_the_files_again_that_it_no_longer_finds(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = results.files("r")
    compact(results, "r")
    lists = [before, results.files("r")]
    monkeypatch.setattr(results, "files", lambda run: lists.pop(0))
    assert numbers(results) == list(range(12))


def test_a_part_that_is_written_again_is_ignored(results: Results) -> None:
    """By a recorder that was frozen."""
    part = results.root / "r/samples/part-0.parquet"
    content = part.read_bytes()
    compact(results, "r")
    part.write_bytes(content)
    assert numbers(results) == list(range(12))
    assert compact(results, "r") == 0
    assert not part.exists()


def test_a_broken_file_stops_it(results: Results) -> None:
    (results.root / "r/samples/part-x.parquet").write_bytes(b"PAR1")
    with pytest.raises(JobError, match=r"part-x.parquet can't be read"):
        compact(results, "r")
    assert len(list((results.root / "r/samples").iterdir())) == 5


def test_the_command(results: Results, redis_url: str, client: Any) -> None:
    words = ["results", "compact", "r", "--results", str(results.root), "--redis", redis_url]
    client.redis.xadd(keys.outbox("r"), {"row": "{}"})
    result = CliRunner().invoke(build(), words)
    assert result.exit_code == 1
    assert "rows of run r are still in Redis" in result.stderr
    client.redis.delete(keys.outbox("r"))
    with ProducerLease(client.redis, "r") as lease:
        lease.acquire()
        result = CliRunner().invoke(build(), words)
    assert result.exit_code == 1
    assert f"process {os.getpid()} on " in result.stderr and "end it first" in result.stderr
    assert len(results.files("r")) == 4
    result = CliRunner().invoke(build(), words)
    assert result.exit_code == 0, result.stderr
    assert "4 files replaced by one" in result.stderr
    result = CliRunner().invoke(build(), words)
    assert (result.exit_code, result.stderr) == (
        0,
        "r: nothing to do, its rows are in one file\n",
    )
    assert "Missing argument 'RUN'" in CliRunner().invoke(build(), ["results", "compact"]).stderr
    assert "compact" in CliRunner().invoke(build(), ["results", "--help"]).stdout
    assert CliRunner().invoke(build(), ["results", "a", "b"]).exit_code == 2


def test_rows_are_removed_from_the_files_that_have_them(results: Results) -> None:
    before = {file: file.stat().st_ino for file in results.files("r")}
    assert remove_rows(results, "r", lambda row, repeat: row in (1, 4, 5)) == 2
    assert numbers(results) == [0, 2, 3, 6, 7, 8, 9, 10, 11]
    after = {file: file.stat().st_ino for file in results.files("r")}
    assert after.keys() == before.keys() and len(after.items() & before.items()) == 2
    assert remove_rows(results, "r", lambda row, repeat: row == 1) == 0
    assert remove_rows(results, "r", lambda row, repeat: True) == 4
    assert numbers(results) == []


@pytest.mark.parametrize("renames", range(3))
def test_any_reader_sees_each_row_once_at_most_whenever_a_removal_stops(
    results: Results, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    names = [file.name for file in results.files("r")]
    seen: list[list[int]] = []

    def replace(temporary: Path, file: Path) -> None:
        if len(seen) == renames:
            raise KeyboardInterrupt
        os.replace(temporary, file)
        table = pq.read_table(results.root / "r/samples", columns=["row_index"])
        seen.append(sorted(table["row_index"].to_pylist()))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with suppress(KeyboardInterrupt):
            remove_rows(results, "r", lambda row, repeat: row in (1, 4, 5))
    kept = [[0, 2, *range(3, 12)], [0, 2, 3, *range(6, 12)]]
    assert seen == kept[:renames]
    remove_rows(results, "r", lambda row, repeat: row in (1, 4, 5))
    assert numbers(results) == kept[1]
    assert [file.name for file in results.files("r")] == names
    assert not list((results.root / "r/_tmp").iterdir())


def test_a_recorder_that_was_frozen_does_not_bring_removed_rows_back(results: Results) -> None:
    rows = [row(i, 1, "x") for i in range(3)]
    remove_rows(results, "r", lambda row, repeat: row < 3)
    write(results.root, rows)  # part-0 again
    assert numbers(results) == list(range(3, 12))


def test_older_attempts_in_one_file_are_dropped(tmp_path: Path) -> None:
    results = write(tmp_path, [row(0, 1, "old"), row(0, 2, "new"), row(1, 1, "one")])
    assert compact(results, "r") == 1
    assert pq.read_table(tmp_path / "r/samples")["text"].to_pylist() == ["new", "one"]
    assert compact(results, "r") == 0


def test_a_damaged_replacement_replaces_nothing(results: Results) -> None:
    parts = {file: file.read_bytes() for file in results.files("r")}
    compact(results, "r")
    (new,) = results.files("r")
    content = new.read_bytes()
    for part, old in parts.items():  # as if it had been killed before it removed them
        part.write_bytes(old)
    new.write_bytes(b"PAR1")
    finish_replacement(results, "r")
    assert all(part.exists() for part in parts)
    new.write_bytes(content)
    finish_replacement(results, "r")
    assert list((results.root / "r/samples").iterdir()) == [new]
