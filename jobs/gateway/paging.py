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
    query = request.query_params
    after, order = query.get("after"), query.get("order", "desc")
    text = query.get("limit", str(default))
    if after is not None and not is_id(kind, after):
        raise invalid(
            f"after: expected the id of the last one before, got {describe(after)}", "after"
        )
    if order not in ("asc", "desc"):
        raise invalid(f"order: expected asc or desc, got {describe(order)}", "order")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise invalid(f"limit: expected an integer from 1 to {most}, got {describe(text)}", "limit")
    return Page(after, int(text), order == "desc")


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
