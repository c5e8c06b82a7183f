"""docs/models.md lists the families of the registry, and refuses what they lack."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from worker.models.registry import FAMILIES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/models.md").read_text()


def model_types(heading: str) -> list[str]:
    """The model types in the first table after a heading."""
    rows = re.findall(r"^\| .*\|$", PAGE.split(f"## {heading}\n")[1].split("\n## ")[0], re.M)
    column = [title.strip() for title in rows[0].split("|")].index("`model_type`")
    return [name for row in rows[1:] for name in re.findall(r"`(\w+)`", row.split("|")[column])]


def test_the_page_lists_every_supported_model_type_once() -> None:
    assert sorted(model_types("Families")) == sorted(FAMILIES)


@pytest.mark.parametrize("model_type", model_types("Refused"))
def test_a_model_type_that_the_page_calls_refused_is_not_supported(model_type: str) -> None:
    assert model_type not in FAMILIES


def test_the_page_names_the_pinned_version_of_the_oracle() -> None:
    pinned = re.search(r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned and f"transformers {pinned[1]} " in PAGE
