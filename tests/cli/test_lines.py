"""What `chatjobs submit` takes as a line, and what it says about the others."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.cli.lines import BadLine, Defaults, Row, read

DEMO = Defaults(model="demo")


def lines(*rows: Any) -> list[bytes]:
    return [json.dumps(row).encode() + b"\n" for row in rows]


def one(row: Any, defaults: Defaults = DEMO) -> Row:
    (good,), bad = read(lines(row), defaults)
    assert not bad
    return good


def fault(line: bytes) -> BadLine:
    good, (bad,) = read([line], DEMO)
    assert not good
    return bad


def test_a_chat_request_is_taken_as_it_is() -> None:
    row = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}
    request = one(row, Defaults()).request
    assert (request.model, request.temperature) == ("m", 0.5)
    assert request.messages[0].text == "hi"


def test_prompt_and_text_stand_for_one_user_message() -> None:
    for name in ("prompt", "text"):
        (message,) = one({name: "hi"}).request.messages
        assert (message.role, message.text) == ("user", "hi")


def test_target_custom_id_and_task_are_kept_beside_the_request() -> None:
    request = one({"prompt": "2+2", "target": "4", "custom_id": "row-1", "task": "sums"}).request
    assert (request.job.target, request.job.custom_id) == ("4", "row-1")
    assert request.metadata == {"task": "sums"}


def test_a_line_of_an_openai_batch_file_is_its_body() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    request = one(line, Defaults()).request
    assert (request.model, request.max_tokens, request.job.custom_id) == ("m", 3, "a")


def test_the_model_of_the_command_line_wins() -> None:
    assert one({"model": "gpt-5", "prompt": "hi"}).request.model == "demo"


def test_a_run_makes_numbered_bulk_rows() -> None:
    rows, _ = read(lines({"prompt": "a"}, {"prompt": "b"}), Defaults("demo", run="r1"))
    assert [row.request.job.row for row in rows] == [0, 1]
    assert {(row.request.job.run, row.request.job.priority) for row in rows} == {("r1", "bulk")}


def test_the_priority_of_the_command_line_wins() -> None:
    defaults = Defaults("demo", run="r1", priority="interactive")
    assert one({"prompt": "a", "job": {"priority": "bulk"}}, defaults).request.job.priority == (
        "interactive"
    )


def test_blank_lines_count_as_lines_but_not_as_rows() -> None:
    (row,), bad = read([b"\n", b"  \n", *lines({"prompt": "a"})], DEMO)
    assert row.line == 3
    assert not bad


def test_a_byte_order_mark_is_no_part_of_the_text() -> None:
    (row,), _ = read([b"\xef\xbb\xbf" + lines({"prompt": "a"})[0]], DEMO)
    assert row.request.messages[0].text == "a"


def test_bad_lines_are_named_with_number_and_field() -> None:
    good, bad = read(
        lines({"prompt": "a"}, {"prompt": "b", "temperature": "hot"}, {"prompt": "c", "topp": 1}),
        DEMO,
    )
    assert len(good) == 1
    assert [(line.line, line.error.param) for line in bad] == [(2, "temperature"), (3, "topp")]
    assert str(bad[0]).startswith("line 2: temperature: ")


def test_what_is_no_row_is_said_in_words() -> None:
    assert "not JSON" in str(fault(b'{"prompt": '))
    assert "not JSON" in str(fault(b"[" * 100_000))
    assert "JSON object" in str(fault(b"[1, 2]"))
    assert "not UTF-8" in str(fault(b'{"prompt": "\xff"}'))
    assert "'messages' is required" in str(fault(b"{}"))
    assert "job: expected an object" in str(fault(b'{"prompt": "a", "job": 3}'))


def test_a_batch_line_for_another_api_is_refused() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    (line,) = lines({"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body})
    assert fault(line).error.param == "url"
    (line,) = lines({"custom_id": "a", "method": "GET", "body": body})
    assert fault(line).error.param == "method"


def test_a_job_id_that_an_earlier_line_has_is_refused() -> None:
    row = {"prompt": "a", "job": {"id": "same"}}
    good, (bad,) = read(lines(row, row), DEMO)
    assert len(good) == 1
    assert (bad.line, bad.error.param) == (2, "job.id")


def test_without_any_model_the_field_is_named() -> None:
    _, (bad,) = read(lines({"prompt": "a"}), Defaults())
    assert bad.error.param == "model"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=3,
)
names = st.sampled_from(
    ["prompt", "text", "messages", "job", "metadata", "body", "custom_id", "target", "task", "url"]
)


@settings(deadline=None)
@given(st.dictionaries(names, json_values, max_size=4))
def test_any_object_is_either_a_row_or_a_named_fault(row: dict[str, Any]) -> None:
    good, bad = read(lines(row), DEMO)
    assert len(good) + len(bad) == 1


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_either_a_row_or_a_named_fault(line: bytes) -> None:
    good, bad = read([line], DEMO)
    assert len(good) + len(bad) == (1 if line.strip() else 0)
