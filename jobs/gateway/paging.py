"""Pages of lists: `after`, `limit` and `order` of a query, and the list as OpenAI's clients read
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from jobs.api.wire import describe
from jobs.errors import invalid
from jobs.gateway.ids import is_id

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page:
    """Where a page begins, and how many it has. `after`: id of the last one before it."""

    after: str | None
    limit: int
    newest_first: bool = True


def read_page(request: Request, kind: str, default: int, most: int) -> Page:
    """The page that a query asks for. `kind`: of the ids. Raises InvalidRequest."""
    after = request.query_params.get("after")
    if after is not None and not is_id(kind, after):
        raise invalid(
            f"after: expected the id of the last one before, got {describe(after)}", "after"
        )
    limit = read_number(request, "limit", 1, most, default)
    return Page(after, limit, reads_newest_first(request))


def reads_newest_first(request: Request) -> bool:
    """The `order` of a query. Raises InvalidRequest."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid(f"order: expected asc or desc, got {describe(order)}", "order")
    return order == "desc"


def read_number(request: Request, name: str, least: int, most: int, default: int) -> int:
    """A number of a query. Raises InvalidRequest."""
    text = request.query_params.get(name)
    if text is None:
        return default
    number = natural(text)
    if number is None or not least <= number <= most:
        raise invalid(
            f"{name}: expected an integer from {least} to {most}, got {describe(text)}", name
        )
    return number


def natural(text: str) -> int | None:
    """The number that a text of up to 16 digits is; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 16 else None


def select(ids: Sequence[str], page: Page, read: Callable[[str], T | None]) -> tuple[list[T], bool]:
    """What `read` gives for the ids of a page, and whether there is more. It gives None for those
    that are left out."""
    found: list[T] = []
    for id in sorted(ids, reverse=page.newest_first):
        if page.after is not None and (id >= page.after if page.newest_first else id <= page.after):
            continue
        one = read(id)
        if one is None:
            continue
        if len(found) == page.limit:
            return found, True
        found.append(one)
    return found, False


def list_dict(items: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
