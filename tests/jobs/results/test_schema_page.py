"""docs/schema.md has each column of the results, with its type and its meaning."""

from __future__ import annotations

import re
from pathlib import Path

from jobs.results.schema import SCHEMA

PAGE = Path(__file__).parents[3] / "docs" / "schema.md"
ROW = re.compile(r"^\| `(\w+)` \| `(.+?)` \| (.+?) \| (.+) \|$", re.MULTILINE)


def test_each_column_is_described_as_in_the_files() -> None:
    columns = ROW.findall(PAGE.read_text(encoding="utf-8"))
    for (name, kind, filled, meaning), field in zip(columns, SCHEMA, strict=True):
        assert name == field.name
        assert kind == str(field.type).replace("element: ", "").replace("item: ", "")
        assert meaning == field.metadata[b"description"].decode()
        assert (filled == "always") != field.nullable, name
