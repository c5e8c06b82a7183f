"""Rows that are scored share jobs, within limits."""

from __future__ import annotations

from typing import Any

from jobs import ChatRequest, ScoreRequest
from jobs.data_sets.source import RequestRow
from jobs.runs.packs import LIMITS, packs


def row(number: int, prompt: str, size: int = 10, model: str = "m") -> RequestRow:
    item = {"type": "loglikelihood", "prompt": prompt, "continuations": [" a"], "row": number}
    request = ScoreRequest(model=model, items=[item], job={"run": "r", "priority": "bulk"})
    return RequestRow(number, number, 0, f"line {number}", request, size)


def sizes(rows: list[RequestRow], alone: set[int] = frozenset()) -> list[int]:  # type: ignore[assignment]
    found = [*packs(rows, alone.__contains__)]
    assert [one for pack in found for one in pack.rows] == rows
    items = [
        item["row"] for pack in found for item in getattr(pack.request, "items", [{"row": None}])
    ]
    assert items == [one.row for one in rows]
    assert all(pack.request.model == pack.rows[0].request.model for pack in found)
    return [len(pack.rows) for pack in found]


def test_a_pack_ends_at_its_limits_and_holds_one_model() -> None:
    assert sizes([row(n, str(n)) for n in range(LIMITS.items + 3)]) == [LIMITS.items, 3]
    assert sizes([row(n, str(n), LIMITS.characters // 2) for n in range(5)]) == [2, 2, 1]
    assert sizes([row(0, "a", 5 * LIMITS.characters), row(1, "b"), row(2, "c")]) == [1, 2]
    assert sizes([row(0, "a"), row(1, "a", model="n"), row(2, "a", model="n")]) == [1, 2]


def test_rows_of_one_prompt_stay_together_up_to_a_limit() -> None:
    alike = [row(n, "a") for n in range(LIMITS.items + 20)]
    assert sizes([*alike, row(1000, "b")]) == [LIMITS.items + 20, 1]
    assert sizes([row(n, "a", LIMITS.characters) for n in range(6)]) == [LIMITS.overrun, 2]


def test_a_pack_holds_texts_of_so_many_windows() -> None:
    half = {"type": "perplexity", "text": [1] * (LIMITS.sequences // 2), "window": 1}
    requests = [ScoreRequest(model="m", items=[{**half, "row": n}]) for n in range(3)]
    rows = [RequestRow(n, n, 0, f"line {n}", one, 10) for n, one in enumerate(requests)]
    assert sizes(rows) == [2, 1]


def test_some_rows_have_a_job_of_their_own() -> None:
    assert sizes([row(n, "a") for n in range(5)], alone={2}) == [2, 1, 2]
    request: Any = ChatRequest(model="m", messages=[{"role": "user", "content": "a"}])
    chats = [RequestRow(n, n, 0, "", request, 10) for n in range(2)]
    assert [len(pack.rows) for pack in packs(chats, lambda _: False)] == [1, 1]
