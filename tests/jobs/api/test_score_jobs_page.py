"""docs/score-jobs.md names the fields of requests, items and results as the source has them."""

from __future__ import annotations

import re
from typing import Any

from jobs.api.score_request import ITEM_TYPES, ScoreItem, ScoreRequest, parse_item
from jobs.api.score_result import ContinuationScore, ScoredItem, TextScore
from jobs.results.schema import SCHEMA
from tests.worker.site import ROOT

PAGE = (ROOT / "docs/score-jobs.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def names_of(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_the_tables_have_the_fields_of_the_source() -> None:
    fields = section("Fields of a request")
    request, _, items = fields.partition("Fields of all items:")
    cells = re.findall(r"^\| (`.*?) \|", request, re.MULTILINE)
    assert names_of(" ".join(cells)) == {*ScoreRequest.model_fields}
    table, _, rest = items.partition("\n\nA **loglikelihood**")
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert names_of(" ".join(cells)) == {"type", *ScoreItem.model_fields}
    own = {name for kind in ITEM_TYPES.values() for name in kind.model_fields}
    assert own - {"type", *ScoreItem.model_fields} <= names_of(rest)


def test_all_parts_of_a_result_and_columns_of_rows_are_named() -> None:
    results = names_of(section("Results"))
    for kind in (ScoredItem, ContinuationScore, TextScore):
        assert {*kind.model_fields} <= results
    rows = section("Rows").replace("`prompt` (the text)", "`prompt`")
    assert names_of(rows) - {*SCHEMA.names} == set()


def test_the_example_is_valid() -> None:
    example = PAGE.partition("client.submit(")[2].partition("}})")[0] + "}}"
    request: Any = eval(example)  # it is a dict
    for item in ScoreRequest.parse(request).items:
        parse_item(item)
