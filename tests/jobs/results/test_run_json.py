"""run.json: what is read of it, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs import Results
from jobs.errors import InvalidRequest
from jobs.results.run_json import RunJson
from jobs.runs.run_file import RunFile

RECORDED = Path(__file__).parents[2] / "upgrade/e363a82/results"


def test_files_of_older_versions_and_of_recorders_are_read(tmp_path: Path) -> None:
    found = RunJson.read(RECORDED / "written")
    assert found.content["engine_version"] == "0.1.0"
    assert (found.configuration, found.data_set, found.state, found.size) == (None,) * 4
    RunJson({"run_id": "r", "engine": None, "schema_version": None}).write(tmp_path / "r")
    assert Results(tmp_path).config("r") == {"run_id": "r", "engine": None, "schema_version": None}
    assert RunJson.read(tmp_path / "none").content == {}


def test_a_run_keeps_keys_that_it_does_not_know(tmp_path: Path) -> None:
    RunJson({"run_id": "r", "of a later version": [1]}).write(tmp_path / "r")
    RunFile(Results(tmp_path), "r").write({"data set": {"content": "c"}, "limit": 3}, "running")
    RunFile(Results(tmp_path), "r").write(
        {"data set": {"content": "c"}, "limit": None}, "done", audit={"rows_in": 4, "samples": 2}
    )
    found = RunJson.read(tmp_path / "r")
    assert found.content["of a later version"] == [1]
    assert (found.data_set, found.state, found.size) == ("c", "done", (4, 2))
    assert RunJson({"audit": {"rows_in": 4, "samples": 0}}).size is None


def test_text_that_utf_8_can_not_hold_is_written_and_read(tmp_path: Path) -> None:
    content = {"configuration": {"options": {"stop": ["\ud800", "ü"]}}}
    RunJson(content).write(tmp_path / "r")
    assert RunJson.read(tmp_path / "r").content == content
    text = (tmp_path / "r/run.json").read_text("utf-8")
    assert json.loads(text) == content and "ü" in text


def test_one_that_can_not_be_used_is_an_error_of_the_api(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r/run.json").write_text('{"engine": 3}')
    with pytest.raises(InvalidRequest, match=r"engine in .*/r/run\.json is an integer, not a str"):
        Results(tmp_path).config("r")
