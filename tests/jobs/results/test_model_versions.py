"""The versions of the models that have made the answers of a run, and what is said of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from jobs.results.files import Results, dataset_of
from jobs.results.model_versions import (
    ModelVersion,
    difference,
    is_mixture,
    mixture_sentence,
    read_answers,
)
from tests.jobs.scores.runs import make_run
from worker.processes.resident import resident_bytes

FILES = 300
OLD = {"model_fingerprint": "0" * 32, "tokenizer_hash": "t", "dtype": "float32"}
NEW = {**OLD, "dtype": "bfloat16, Q8_0", "chat_template_hash": "c" * 64}


def answers_of(tmp_path: Path, *rows: dict[str, Any]) -> Any:
    return read_answers(make_run(tmp_path, list(rows)).dataset("r1"))


def test_versions_are_counted_by_model(tmp_path: Path) -> None:
    found = answers_of(tmp_path, OLD, NEW, NEW, {**NEW, "model": "a"})
    assert [one.to_dict() for one in found] == [
        {"model": "a", **ModelVersion.of(NEW)._asdict(), "rows": 1},
        {"model": "demo", **ModelVersion.of(NEW)._asdict(), "rows": 2},
        {"model": "demo", **ModelVersion.of(OLD)._asdict(), "rows": 1},
    ]
    assert mixture_sentence("r1", found) == (
        "run r1 has answers of 2 versions of model 'demo' (chat template cccccccccccc, dtype "
        "bfloat16, Q8_0: 2 rows; chat template none, dtype float32: 1 row): its figures are of a "
        "mixture"
    )


def test_two_models_with_one_version_each_are_no_mixture(tmp_path: Path) -> None:
    found = answers_of(tmp_path, OLD, {**NEW, "model": "a"})
    assert not is_mixture(found)
    assert mixture_sentence("r1", found) == ""


def test_rows_without_an_answer_or_a_version_do_not_count(tmp_path: Path) -> None:
    found = answers_of(tmp_path, OLD, {**NEW, "status": "error"}, {"text": "of a fake worker"})
    assert [one.rows for one in found] == [1]


def test_no_metadata_of_files_is_kept_while_answers_are_counted(tmp_path: Path) -> None:
    """A run may have thousands of files; the metadata of each takes about half a megabyte."""
    make_run(tmp_path, [OLD])
    (first,) = Results(tmp_path).files("r1")
    for number in range(FILES):
        shutil.copy(first, first.with_name(f"copy-{number}.parquet"))
    rows = dataset_of(Results(tmp_path).files("r1"))
    before = resident_bytes()
    assert sum(one.rows for one in read_answers(rows)) == FILES + 1
    assert resident_bytes() - before < FILES * 100_000


def test_another_commit_or_device_is_the_same_version(tmp_path: Path) -> None:
    other = {"model_revision": "abc", "device_name": "H100", "engine_version": "9"}
    assert [one.rows for one in answers_of(tmp_path, OLD, {**OLD, **other})] == [2]


def test_a_difference_names_what_has_changed() -> None:
    assert difference(ModelVersion.of(OLD), ModelVersion.of(NEW)) == (
        "chat template none → cccccccccccc, dtype float32 → bfloat16, Q8_0"
    )
