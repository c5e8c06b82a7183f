"""Outbox entries and the rows that are made of them."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.api.chat_template import template_hash
from jobs.api.sampling import Sampling
from jobs.errors import JobError
from jobs.operations import rows_of
from jobs.results import outbox
from jobs.results.files import table_of
from jobs.results.outbox import DEFAULT_RUN, decode, encode, row_index_of, run_of
from jobs.results.schema import SCHEMA
from tests.jobs.results.entries import REQUEST, error_entry, ok_entry
from worker.backend import ModelInfo


def test_a_completion_gives_one_row_with_all_its_facts():
    (row,) = rows_of(ok_entry(logprobs=True))
    table = table_of([row])
    assert table.schema.equals(SCHEMA)
    read = table.to_pylist()[0]
    known = {
        "run_id": "r1",
        "job_id": "j1",
        "row_index": 4,
        "choice_index": 0,
        "status": "ok",
        "custom_id": "mine",
        "target": "5",
        "session": "s1",
        "tags": ["a", "b"],
        "text": "5.0",
        "finish_reason": "stop",
        "input_tokens": 9,
        "output_tokens": 2,
        "output_token_ids": [5, 6],
        "token_logprobs": [-0.25, -0.5],
        "logprob_sum": -0.75,
        "queue_s": 1.0,
        "ttft_s": 0.5,
        "tpot_s": 2.0,
        "duration_s": 2.5,
        "seed": 17,
        "temperature": 0.0,
        "max_tokens": 7,
        "stop": ["\n"],
        "model_revision": "abc",
        "model_fingerprint": "f00",
        "worker_id": "w1",
        "error_type": None,
    }
    assert {name: read[name] for name in known} == known
    assert read["messages"][1]["content"] == "2+3"
    assert read["messages"][2]["tool_calls"][0]["function"]["name"] == "add"
    assert [top["token"] for top in read["top_logprobs"][0]] == ["5", "6"]
    assert json.loads(read["sampling_extra"]) == {"logit_bias": {"5": 1.5}}
    assert json.loads(read["metadata"]) == {"source": "test"}
    assert read["enqueued_at"].timestamp() == 100.0


# Columns that only scoring writes, and one that nothing writes yet.
RESERVED_FOR_SCORING = (
    *("prompt", "continuation", "is_greedy", "scored_bytes", "scored_words"),
    *("truncated_tokens", "choices", "picked_index", "dataset"),
)


def test_every_column_is_written_or_reserved_for_scoring():
    answered = ok_entry(logprobs=True)
    answered["provenance"] = dict.fromkeys(ModelInfo.__dataclass_fields__, "x")
    answered["sampling"] = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        n=1,
    ).to_dict()
    answered["peak_memory_mb"] = 512
    answered["request"] |= {"tools": [], "response_format": {"type": "json_object"}}
    completion: Any = answered["completion"]
    completion["usage"] |= {
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 1,
            "accepted_prediction_tokens": 3,
            "rejected_prediction_tokens": 1,
            "prediction_steps": 1,
        },
    }
    completion["choices"][0]["message"] |= {"reasoning_content": "hm", "tool_calls": []}
    rows = [*rows_of(answered), *rows_of(error_entry())]
    assert {name for row in rows for name in row} <= set(SCHEMA.names)
    written = {name for row in rows for name, value in row.items() if value is not None}
    assert written.isdisjoint(RESERVED_FOR_SCORING)
    assert written | set(RESERVED_FOR_SCORING) == set(SCHEMA.names)


def test_each_row_has_the_details_of_its_own_choice():
    entry = ok_entry(choices=2)
    entry["details"] = [
        {
            "reasoning_tokens": number,
            "accepted_prediction_tokens": number,
            "rejected_prediction_tokens": 2,
            "prediction_steps": number,
        }
        for number in (1, 5)
    ]
    names = ("reasoning_tokens", "accepted_tokens", "drafted_tokens", "draft_steps")
    assert [[row[name] for name in names] for row in rows_of(entry)] == [[1, 1, 3, 1], [5, 5, 7, 5]]
    entry["status"] = "cancelled"  # one row, of the first choice
    assert [[row[name] for name in names] for row in rows_of(entry)] == [[1, 1, 3, 1]]
    older: Any = ok_entry(choices=2)  # its writer has only the sum
    older["completion"]["usage"]["completion_tokens_details"] = {"prediction_steps": 6}
    assert [row["draft_steps"] for row in rows_of(older)] == [None, None]


def test_n_choices_give_n_rows_with_distinct_keys():
    rows = rows_of(ok_entry(choices=3))
    assert [row["choice_index"] for row in rows] == [0, 1, 2]
    assert [row["text"] for row in rows] == ["5.0", "5.1", "5.2"]
    assert {row["output_tokens"] for row in rows} == {2}


def test_an_error_gives_exactly_one_row_with_its_code_and_message():
    (row,) = rows_of(error_entry())
    assert (row["status"], row["finish_reason"], row["choice_index"]) == ("error", "error", 0)
    assert (row["error_type"], row["error_retryable"]) == ("out_of_memory", True)
    assert row["error_message"] == "needs 9 GiB, 4 GiB are free"
    assert row["text"] is None


def test_a_cancelled_job_with_many_choices_gives_one_row_with_partial_text():
    entry = ok_entry(choices=3)
    entry["status"] = "cancelled"
    entry["error"] = JobError("cancelled", "stopped").to_dict()
    (row,) = rows_of(entry)
    assert (row["status"], row["finish_reason"], row["text"]) == ("cancelled", "cancelled", "5.0")


def test_jobs_without_a_row_get_a_stable_index_outside_the_given_range():
    keys = {row_index_of(f"job{i}", {}) for i in range(1000)}
    assert len(keys) == 1000
    assert min(keys) >= 2**62
    assert max(keys) < 2**63
    assert row_index_of("a", {}) == row_index_of("a", {"job": {"row": "x"}})
    assert row_index_of("a", {"job": {"row": 7}}) == 7


@pytest.mark.parametrize("run", ["../x", ".x", "a/b", "", 7, None, "x" * 101])
def test_a_run_is_always_a_plain_folder_name(run):
    assert run_of({"job": {"run": run}}) == DEFAULT_RUN


def test_the_request_hash_ignores_order_and_fields_that_do_not_affect_the_answer():
    first = rows_of(ok_entry(row=1))[0]["request_hash"]
    entry = ok_entry(row=2)
    entry["request"] = dict(reversed(entry["request"].items())) | {"user": "u"}
    assert rows_of(entry)[0]["request_hash"] == first
    entry["request"]["temperature"] = 1
    assert rows_of(entry)[0]["request_hash"] != first


def test_an_entry_with_a_lone_surrogate_survives_its_json():
    entry = error_entry()
    entry["request"]["messages"] = [{"role": "user", "content": "a\ud800b"}]
    again = decode(encode(entry).encode())
    assert again == entry
    assert table_of(rows_of(again)).to_pylist()[0]["messages"][0]["content"] == "a?b"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**62, max_value=2**70)
    | st.floats()
    | st.text(alphabet=st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted(
    {*REQUEST, "temperature", "top_k", "n", "seed", "tools", "stop_token_ids", "response_format"}
)


@given(
    request=st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, json_values)),
    overrides=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            [
                "completion",
                "error",
                "sampling",
                "prompt_token_ids",
                "output_token_ids",
                "token_logprobs",
                "enqueued_at",
                "finished_at",
                "seed",
                "provenance",
            ],
            json_values,
        ),
    ),
)
def test_no_entry_can_stop_the_recorder(request, overrides):
    entry: Any = {**error_entry(), "request": request, **overrides}
    sink = pa.BufferOutputStream()
    table = table_of(rows_of(decode(encode(entry))))
    pq.write_table(table, sink)
    assert table.num_rows == 1


def test_the_hash_of_the_template_is_that_of_the_one_that_was_used() -> None:
    entry = ok_entry()
    entry["provenance"] = {**(entry["provenance"] or {}), "template_hash": "own"}
    (row,) = rows_of(entry)
    assert row["chat_template_hash"] == "own"
    entry["request"] = {**entry["request"], "chat_template": "{{ messages }}"}
    (row,) = rows_of(entry)
    assert row["chat_template_hash"] == template_hash({"default": "{{ messages }}"})


def test_store_false_leaves_neither_prompt_nor_answer_in_the_row() -> None:
    request = {
        "model": "m",
        "store": False,
        "messages": [{"role": "user", "content": "secret question"}],
        "metadata": {"a": "secret"},
        "job": {"run": "r", "row": 3, "custom_id": "c", "target": "secret"},
    }
    message = {"role": "assistant", "content": "secret answer", "reasoning_content": "secret"}
    completion = {
        "id": "x",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
        "prompt_logprobs": [None, {"7": {"decoded_token": "secret", "logprob": -1.0, "rank": 1}}],
    }
    entry = outbox.outbox_entry(
        "j",
        request,
        "ok",
        operation="chat",
        attempt=1,
        completion=completion,
        prompt_token_ids=[1, 2],
        output_token_ids=[[3, 4, 5]],
        token_logprobs=[[-1.0]],
    )
    assert "secret" not in outbox.encode(entry)
    (row,) = rows_of(entry)
    assert (row["run_id"], row["row_index"], row["custom_id"]) == ("r", 3, "c")
    assert (row["finish_reason"], row["input_tokens"], row["output_tokens"]) == ("stop", 2, 3)
    assert row["text"] is row["messages"] is row["token_logprobs"] is None
    stored = outbox.outbox_entry("j", {**request, "store": True}, "ok", operation="chat", attempt=1)
    assert "secret question" in outbox.encode(stored)
