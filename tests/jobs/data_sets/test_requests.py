"""Rows that `chatjobs submit` accepts, and the errors for all others."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.data_sets.requests import InvalidLine, Overrides, RequestLine
from jobs.data_sets.requests import read_requests as read
from jobs.data_sets.text_rows import json_rows

DEMO = Overrides(model="demo")


def lines(*rows: Any) -> list[bytes]:
    return [json.dumps(row).encode() + b"\n" for row in rows]


def read_requests(
    content: list[bytes], overrides: Overrides
) -> tuple[list[RequestLine], list[InvalidLine]]:
    """The valid and the invalid lines."""
    found = list(read(json_rows(content), overrides))
    valid = [line for line in found if isinstance(line, RequestLine)]
    return valid, [line for line in found if isinstance(line, InvalidLine)]


def accepted(row: Any, overrides: Overrides = DEMO) -> RequestLine:
    """The request line of a row that must be valid."""
    (line,), invalid = read_requests(lines(row), overrides)
    assert not invalid
    return line


def rejected(line: bytes) -> InvalidLine:
    """The error of a line that must be invalid."""
    valid, (error,) = read_requests([line], DEMO)
    assert not valid
    return error


def test_a_chat_request_is_accepted_unchanged() -> None:
    row = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}
    request = accepted(row, Overrides()).request
    assert (request.model, request.temperature) == ("m", 0.5)
    assert request.messages[0].text == "hi"


def test_prompt_and_text_become_the_user_message() -> None:
    for name in ("prompt", "text"):
        (message,) = accepted({name: "hi"}).request.messages
        assert (message.role, message.text) == ("user", "hi")


def test_target_custom_id_and_task_are_stored_with_the_job() -> None:
    request = accepted(
        {"prompt": "2+2", "target": "4", "custom_id": "row-1", "task": "sums"}
    ).request
    assert (request.job.target, request.job.custom_id) == ("4", "row-1")
    assert request.metadata == {"task": "sums"}


def test_an_openai_batch_line_yields_its_body() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    request = accepted(line, Overrides()).request
    assert (request.model, request.max_tokens, request.job.custom_id) == ("m", 3, "a")


def test_the_model_option_overrides_the_line() -> None:
    assert accepted({"model": "gpt-5", "prompt": "hi"}).request.model == "demo"


def test_run_option_numbers_the_rows_and_makes_them_bulk() -> None:
    rows, _ = read_requests(lines({"prompt": "a"}, {"prompt": "b"}), Overrides("demo", run="r1"))
    assert [row.request.job.row for row in rows] == [0, 1]
    assert {(row.request.job.run, row.request.job.priority) for row in rows} == {("r1", "bulk")}


def test_the_priority_option_overrides_the_line() -> None:
    overrides = Overrides("demo", run="r1", priority="interactive")
    assert accepted(
        {"prompt": "a", "job": {"priority": "bulk"}}, overrides
    ).request.job.priority == ("interactive")


def test_blank_lines_are_counted_but_skipped() -> None:
    (line,), invalid = read_requests([b"\n", b"  \n", *lines({"prompt": "a"})], DEMO)
    assert line.number == 3
    assert not invalid


def test_a_byte_order_mark_is_ignored() -> None:
    (line,), _ = read_requests([b"\xef\xbb\xbf" + lines({"prompt": "a"})[0]], DEMO)
    assert line.request.messages[0].text == "a"


def test_errors_name_line_number_and_field() -> None:
    valid, invalid = read_requests(
        lines({"prompt": "a"}, {"prompt": "b", "temperature": "hot"}, {"prompt": "c", "topp": 1}),
        DEMO,
    )
    assert len(valid) == 1
    assert [(line.number, line.error.param) for line in invalid] == [
        (2, "temperature"),
        (3, "topp"),
    ]
    assert invalid[0].sentence.startswith("field 'temperature': ")


def test_errors_say_what_is_wrong_with_the_line() -> None:
    assert "not JSON" in rejected(b'{"prompt": ').sentence
    assert "not JSON" in rejected(b"[" * 100_000).sentence
    assert "JSON object" in rejected(b"[1, 2]").sentence
    assert "not UTF-8" in rejected(b'{"prompt": "\xff"}').sentence
    assert rejected(b"{}").sentence == "a row needs messages, prompt or text"
    assert "not UTF-8 text" in rejected('{"prompt": "a"}'.encode("utf-16")).sentence
    assert "field 'job': expected an object" in rejected(b'{"prompt": "a", "job": 3}').sentence


def test_a_batch_line_for_another_endpoint_is_rejected() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    (line,) = lines({"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body})
    assert rejected(line).error.param == "url"
    (line,) = lines({"custom_id": "a", "method": "GET", "body": body})
    assert rejected(line).error.param == "method"


def test_a_duplicate_job_id_is_rejected() -> None:
    row = {"prompt": "a", "job": {"id": "same"}}
    valid, (error,) = read_requests(lines(row, row), DEMO)
    assert len(valid) == 1
    assert (error.number, error.error.param) == (2, "job.id")


def test_a_missing_model_is_named() -> None:
    _, (line,) = read_requests(lines({"prompt": "a"}), Overrides())
    assert line.error.param == "model"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=3,
)
names = st.sampled_from(
    ["prompt", "text", "messages", "job", "metadata", "body", "custom_id", "target", "task", "url"]
)


@settings(max_examples=50)
@given(st.dictionaries(names, json_values, max_size=4))
def test_any_object_is_either_valid_or_an_error(row: dict[str, Any]) -> None:
    valid, invalid = read_requests(lines(row), DEMO)
    assert len(valid) + len(invalid) == 1


@given(st.binary())
def test_any_bytes_are_either_valid_or_an_error(line: bytes) -> None:
    valid, invalid = read_requests([line], DEMO)
    assert len(valid) + len(invalid) == (1 if line.strip() else 0)


def test_what_is_not_an_object_is_named() -> None:
    request = {"messages": [{"role": "user", "content": "hi"}]}
    assert rejected(lines([request])[0]).sentence == (
        "expected a JSON object, got an array: write each object on a line of its own, as "
        "jq -c '.[]' does"
    )
    assert rejected(b"null").sentence == "expected a JSON object, got null"
    assert rejected(b'"text"').sentence == "expected a JSON object, got 'text'"


def test_numbers_are_taken_as_pandas_writes_them() -> None:
    request = accepted(
        {"prompt": "a", "max_tokens": 64.0, "stop_token_ids": [1.0, 2], "custom_id": 3, "target": 4}
    ).request
    assert (request.max_tokens, request.stop_token_ids) == (64, [1, 2])
    assert (request.job.custom_id, request.job.target) == ("3", "4")
    assert rejected(b'{"prompt": "a", "target": true}').error.param == "target"
    assert rejected(b'{"prompt": "a", "custom_id": 3.0}').error.param == "custom_id"


def test_a_target_may_be_any_number() -> None:
    for target, text in ((5.0, "5"), (0.5, "0.5"), (-3.0, "-3"), (1e16, "10000000000000000")):
        assert accepted({"prompt": "a", "target": target}).request.job.target == text


def test_fields_that_exclude_each_other_are_named() -> None:
    for first, second in (("messages", "prompt"), ("messages", "text"), ("prompt", "text")):
        row = {first: "a", second: "b"}
        error = rejected(lines(row)[0]).sentence
        assert error == f"{first} and {second} exclude each other: give one"
    assert accepted({"prompt": "a", "text": None}).request.messages[0].text == "a"


def test_a_known_column_that_is_kept_is_named_where_it_is_missing() -> None:
    valid, (error,) = read_requests(lines({"prompt": "a"}), Overrides("m", keep=("prompt",)))
    assert not valid
    assert error.sentence == (
        "a row needs messages, prompt or text; prompt is a known field, and "
        "--keep prompt only keeps it"
    )


def test_an_integer_with_too_many_digits_is_refused_in_plain_words() -> None:
    error = rejected(b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}").sentence
    assert error == "not JSON that can be read: a number has more than 4300 digits"


def test_a_field_with_a_strange_name_is_shown_on_one_line() -> None:
    error = rejected(lines({"prompt": "a", "a\nb[red]": 1})[0]).sentence
    assert error.startswith(r"unknown field 'a\nb[red]'")
    assert "\n" not in error
    error = rejected(lines({"prompt": "a", "job": {"a\nb[red]": 1}})[0]).sentence
    assert r"unknown field 'job.a\nb[red]'" in error


def test_a_row_without_a_prompt_is_told_what_a_row_needs() -> None:
    error = rejected(b'{"question": "2+2", "level": 3}').sentence
    assert error == (
        "a row needs messages, prompt or text, and this one has 'question', 'level' "
        "(--map question=prompt takes 'question' as the prompt)"
    )


def test_an_unknown_column_is_named_in_one_short_line() -> None:
    error = rejected(b'{"prompt": "2+2", "level": 3}').sentence
    assert error == (
        "unknown field 'level'; --keep level keeps it in the results (known are messages, "
        "prompt, text, custom_id, target, task and the fields of a request)"
    )


def test_a_mistyped_column_to_keep_is_named() -> None:
    _, (error,) = read_requests(lines({"prompt": "a", "level": 3}), Overrides("m", keep=("levle",)))
    assert error.sentence == (
        "unknown field 'level'; --keep level keeps it in the results, and there is no "
        "field 'levle' to keep"
    )
