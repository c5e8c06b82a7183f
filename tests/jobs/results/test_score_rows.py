"""The rows of scoring jobs."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import JobError, invalid
from jobs.operations import rows_of
from jobs.results.files import table_of
from jobs.results.outbox import OutboxEntry, outbox_entry
from jobs.results.schema import SCHEMA

LOGLIKELIHOOD: dict[str, Any] = {
    "type": "loglikelihood",
    "prompt": "The dog",
    "continuations": [" sleeps", [5, 6]],
    "custom_id": "first",
    "target": " sleeps",
    "metadata": {"source": "test"},
}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "messages": [{"role": "user", "content": "2+3?"}],
    "choices": ["5", "six"],
    "target": "5",
    "row": 70,
    "repeat": 2,
}
TEXT: dict[str, Any] = {"type": "perplexity", "text": "a b c"}
BAD: dict[str, Any] = {"type": "foo", "custom_id": "bad"}
ITEMS = [LOGLIKELIHOOD, CHOICE, TEXT, BAD]


def scored(logprob: float, tokens: int, size: int) -> dict[str, Any]:
    return {
        "logprob_sum": logprob,
        "is_greedy": logprob > -1,
        "tokens": tokens,
        "bytes": size,
        "token_ids": list(range(tokens)),
        "token_logprobs": [logprob / tokens] * tokens,
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "truncated_tokens": 0,
    }


RESULTS: list[dict[str, Any]] = [
    {"type": "loglikelihood", "continuations": [scored(-0.5, 1, 7), scored(-4.0, 2, 2)]},
    {"type": "choice", "continuations": [scored(-3.0, 1, 1), scored(-2.0, 2, 3)], "picked": 1},
    {
        "type": "perplexity",
        "text": {"logprob_sum": -9.0, "tokens": 3, "words": 3, "bytes": 5, "windows": 1},
    },
    {"error": invalid("type: must be one of …", "type").to_dict()},
]


def entry(items: Any = ITEMS, results: Any = RESULTS, **fields: Any) -> OutboxEntry:
    options = {"run": "r", "row": 10}
    made: dict[str, Any] = {"status": "ok", "operation": "score", "attempt": 1, **fields}
    completion = None if results is None else {"object": "score", "items": results}
    request = {"model": "demo", "items": items, "job": options}
    return outbox_entry("j1", request, made.pop("status"), completion=completion, **made)


def test_each_item_has_the_rows_of_its_own_key() -> None:
    first, second, choice, text, bad = table_of(rows_of(entry())).to_pylist()
    assert table_of(rows_of(entry())).schema.equals(SCHEMA)
    names = ("row_index", "repeat_index", "choice_index", "operation", "status")
    assert [tuple(row[name] for name in names) for row in (first, second, choice, text, bad)] == [
        (10, 0, 0, "loglikelihood", "ok"),
        (10, 0, 1, "loglikelihood", "ok"),
        (70, 2, 0, "choice", "ok"),
        (12, 0, 0, "perplexity", "ok"),
        (13, 0, 0, "foo", "error"),
    ]
    known = {
        "prompt": "The dog",
        "continuation": " sleeps",
        "logprob_sum": -0.5,
        "is_greedy": True,
        "scored_tokens": 1,
        "scored_bytes": 7,
        "truncated_tokens": 0,
        "token_logprobs": [-0.5],
        "output_token_ids": [0],
        "input_tokens": 3,
        "cached_tokens": 1,
        "custom_id": "first",
        "target": " sleeps",
        "metadata": '{"source": "test"}',
        "error_type": None,
    }
    assert {name: first[name] for name in known} == known
    assert (second["continuation"], second["logprob_sum"]) == (None, -4.0)
    assert (choice["text"], choice["picked_index"], choice["target"]) == ("six", 1, "5")
    assert choice["messages"][0]["content"] == "2+3?"
    assert choice["logprob_sum"] == -2.0
    assert [
        (one["text"], one["logprob_sum"], one["scored_bytes"]) for one in choice["choices"]
    ] == [
        ("5", -3.0, 1),
        ("six", -2.0, 3),
    ]
    assert (text["prompt"], text["scored_words"], text["scored_tokens"]) == ("a b c", 3, 3)
    assert (bad["custom_id"], bad["error_type"]) == ("bad", "invalid_request")
    assert len({row["request_hash"] for row in (first, choice, text, bad)}) == 4
    assert first["request_hash"] == second["request_hash"]


def test_the_hash_of_a_row_is_that_of_its_item_whatever_it_is_packed_with() -> None:
    alone, *_ = rows_of(entry([LOGLIKELIHOOD], RESULTS[:1]))
    other = {**LOGLIKELIHOOD, "custom_id": "second", "row": 99, "target": None}
    _, _, packed, *_ = rows_of(entry([CHOICE, TEXT, other], RESULTS[1:3] + RESULTS[:1]))
    _, _, changed, *_ = rows_of(
        entry([CHOICE, TEXT, {**other, "prompt": "The cat"}], RESULTS[1:3] + RESULTS[:1])
    )
    assert alone["request_hash"] == packed["request_hash"] != changed["request_hash"]


def test_a_job_that_failed_has_a_row_for_each_item_and_keeps_what_was_scored() -> None:
    error = JobError("cancelled", "job j1 was cancelled").to_dict()
    partial = [RESULTS[0], {"type": "choice", "error": error}, {}]
    rows = rows_of(entry(results=partial, status="cancelled", error=error))
    assert [(row["row_index"], row["status"], row["error_type"]) for row in rows] == [
        (10, "ok", None),
        (10, "ok", None),
        (70, "cancelled", "cancelled"),
        (12, "cancelled", "cancelled"),
        (13, "cancelled", "cancelled"),
    ]
    lost = JobError("worker_lost", "lost").to_dict()
    rows = rows_of(entry(results=None, status="error", error=lost))
    assert [(row["row_index"], row["error_type"]) for row in rows] == [
        (number, "worker_lost") for number in (10, 70, 12, 13)
    ]


def test_a_request_that_is_refused_has_one_row_for_each_key() -> None:
    error = invalid("items: 0 and 1 have one row").to_dict()
    twice = [{**TEXT, "row": 3}, {**TEXT, "row": 3}, {**TEXT, "row": 3, "repeat": 1}]
    rows = rows_of(entry(twice, None, status="error", error=error))
    assert [(row["row_index"], row["repeat_index"]) for row in rows] == [(3, 0), (3, 1)]
    for items in (None, [], 5, {}):
        (row,) = rows_of(entry(items, None, status="error", error=error))
        assert (row["row_index"], row["choice_index"]) == (10, 0)


def test_items_without_a_row_have_one_that_each_attempt_gives_them() -> None:
    def indexes(job: str) -> list[int]:
        made: Any = {**entry([TEXT, TEXT], RESULTS[2:3] * 2), "job_id": job, "row_index": None}
        made["request"] = {**made["request"], "job": {}}
        return [row["row_index"] for row in rows_of(made)]

    assert indexes("a") == indexes("a")
    assert len({*indexes("a"), *indexes("b")}) == 4
    assert min(indexes("a")) >= 2**62


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*LOGLIKELIHOOD, *CHOICE, "text", "error", "picked", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None)
@given(items=JSON | st.lists(JSON, max_size=3), results=JSON | st.lists(JSON, max_size=3))
def test_any_json_makes_rows_that_fit_the_schema(items: Any, results: Any) -> None:
    rows = rows_of(entry(items, results))
    table = table_of(rows)
    keys = list(
        zip(
            *(table[name].to_pylist() for name in ("row_index", "repeat_index", "choice_index")),
            strict=True,
        )
    )
    assert len(keys) == len(set(keys)) >= (not isinstance(items, list) or bool(items))
