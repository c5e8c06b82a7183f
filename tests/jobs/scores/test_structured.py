"""Answers in JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.errors import InvalidRequest
from jobs.scores.structured import JsonSchema, ValidJson

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a": [1, null]}', 1),
        ("3", 1),
        ("{'a': 1}", 0),
        ("NaN", 0),
        ('{"a":', 0),
        ("", 0),
        pytest.param("[" * 10**5, 0, id="nested"),
        pytest.param(f'{{"n": -{"7" * 10**6}}}', 1, id="digits"),
    ],
)
def test_valid_json(text: str, valid: int) -> None:
    assert ValidJson(None).score({"text": text}).value == valid


def test_a_schema_of_a_file_and_of_the_request(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    rows = [{"text": text} for text in ('{"n": 1}', '{"n": "1"}', "{", '{"n": 1.5}')]
    metric = JsonSchema(str(file))
    assert [metric.score(row).value for row in rows] == [1, 0, 0, 0]
    assert metric.score(rows[1]).explanation == "$.n: '1' is not of type 'integer'"
    own = JsonSchema(None)
    with_format = [{**row, "response_format": json.dumps(wanted)} for row in rows]
    assert [own.score(row).value for row in with_format] == [1, 0, 0, 0]
    with pytest.raises(ValueError, match="no JSON schema in its response_format"):
        own.score({"text": "{}", "response_format": '{"type": "json_object"}'})


@pytest.mark.parametrize("content", ['{"type": "nonsense"}', "{", None])
def test_a_file_without_a_schema_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidRequest, match=r"schema\.json"):
        JsonSchema(str(file))


def test_references_to_other_documents_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_: pytest.fail("it was followed"))
    file = tmp_path / "schema.json"
    file.write_text('{"$ref": "http://127.0.0.1:1/other.json"}')
    with pytest.raises(Exception, match=r"other\.json"):
        JsonSchema(str(file)).score({"text": "{}"})
