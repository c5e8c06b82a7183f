"""The limits on the size of the code: the main line of a job, files, and loose files."""

from __future__ import annotations

import pytest

from tests.main_line import PAGE, ROOT, imported_modules, line_count, listed, module_name

MAX_FILES = 12  # in the main line of a job
MAX_LINES = 300  # in a file of jobs/ or worker/; a file of the main line has fewer
MAX_LOOSE = 6  # files directly in worker/

# A job reaches these by data: a queue in Redis, the backend protocol, an outbox in Redis.
REACHED_BY_DATA = ("worker/queue/loop.py", "worker/engine/engine.py", "worker/record/recorder.py")

MAIN_LINE = listed(PAGE.read_text(encoding="utf-8"))
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("jobs", "worker")
    for path in (ROOT / package).rglob("*.py")
)


def test_the_main_line_has_at_most_12_files_and_no_duplicates() -> None:
    assert len(set(MAIN_LINE)) == len(MAIN_LINE) <= MAX_FILES


@pytest.mark.parametrize("path", MAIN_LINE)
def test_a_file_of_the_main_line_exists_and_has_fewer_than_300_lines(path: str) -> None:
    assert path in SOURCES
    assert line_count(ROOT / path) < MAX_LINES


@pytest.mark.parametrize("number", range(1, len(MAIN_LINE)))
def test_a_file_of_the_main_line_is_imported_by_one_before_it(number: int) -> None:
    path = MAIN_LINE[number]
    importers = [
        other for other in MAIN_LINE[:number] if module_name(path) in imported_modules(ROOT / other)
    ]
    assert importers or path in REACHED_BY_DATA


@pytest.mark.parametrize("section", ["", "No list.", "1. `jobs/keys.py`: names\n2. jobs/lua.py"])
def test_a_page_without_a_list_of_paths_is_an_error(section: str) -> None:
    page = f"\n## The main line of a job\n\n{section}\n\n## Next\n1. `jobs/errors.py`: errors\n"
    with pytest.raises(ValueError, match="no numbered list of paths"):
        listed(page)


@pytest.mark.parametrize("path", SOURCES)
def test_no_source_file_exceeds_300_lines(path: str) -> None:
    assert line_count(ROOT / path) <= MAX_LINES


def test_worker_has_at_most_six_loose_files() -> None:
    loose = [path for path in SOURCES if path.startswith("worker/") and path.count("/") == 1]
    assert 0 < len(loose) <= MAX_LOOSE, loose
