"""Changes of folders."""

from __future__ import annotations

from pathlib import Path

from jobs.disk import part_of


def test_unfinished_files_of_one_file_are_beside_it_and_never_the_same(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    parts = {part_of(path) for _ in range(8)}
    assert len(parts) == 8
    assert {part.parent for part in parts} == {tmp_path}
    assert all(part.name.startswith(".rows.jsonl.") for part in parts)
