"""docs/http.md lists each route and each code of the gateway, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jobs.client.aio import AsyncClient
from jobs.errors import ERROR_CODES
from jobs.gateway.app import FAMILIES
from jobs.gateway.failures import STATUS
from jobs.gateway.gateway import Gateway
from jobs.gateway.settings import Settings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def served() -> set[tuple[str, str]]:
    """Method and path of each route."""
    settings = Settings(redis_url="redis://localhost:1", results=Path("results"))
    gateway = Gateway(settings, AsyncClient("redis://localhost:1"))
    return {
        (method, re.sub(r":\w+}", "}", route.path))
        for family in FAMILIES
        for route in family.routes(gateway)
        for method in route.methods
        if method != "HEAD"
    }


def test_the_page_has_each_route() -> None:
    listed = re.findall(r"^\| `(\w+) (/\S*)` \|", section("Routes"), re.M)
    assert len(listed) == len(set(listed))
    assert set(listed) == served()


def test_the_page_has_each_status_and_each_code_of_the_gateway() -> None:
    errors = section("Errors")
    listed = {int(found) for found in re.findall(r"^\| (\d+) \|", errors, re.M)}
    used: set[int] = set(STATUS.values())
    codes: set[Any] = set()
    for file in (ROOT / "jobs" / "gateway").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        used |= {int(found) for found in re.findall(r"HttpError\(\s*(\d+)", text)}
        for call in re.findall(r"HttpError\((.*?)\n\s*\)", text, re.S):
            codes |= set(re.findall(r'^\s*"([a-z_]+)",?$', call, re.M))
    assert used == listed
    named = errors.partition("of the gateway: ")[2].partition(".\n")[0]
    assert codes - {*ERROR_CODES, "id", "model"} <= set(re.findall(r"`(\w+)`", named))
