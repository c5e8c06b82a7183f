"""Lines of batch files: those that OpenAI's own types accept, each request once."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.shared import ErrorObject

from jobs.errors import InvalidRequest
from jobs.results.export.openai_batch import batch_lines
from jobs.results.export.write import write_export
from tests.jobs.scores.runs import make_run

MOMENT = datetime(2026, 1, 2, tzinfo=UTC)


def ok(**columns: Any) -> dict[str, Any]:
    return {
        "custom_id": "a",
        "text": "four",
        "finish_reason": "stop",
        "input_tokens": 9,
        "output_tokens": 2,
        "cached_tokens": 8,
        "finished_at": MOMENT,
        **columns,
    }


def failed(code: str, **columns: Any) -> dict[str, Any]:
    return {"status": "error", "error_type": code, "error_message": "why", **columns}


def lines(tmp_path: Path, *rows: dict[str, Any]) -> list[tuple[bool, dict[str, Any]]]:
    results = make_run(tmp_path, rows)
    return [(line.is_answer, line.content) for line in batch_lines(results, "r1")]


def test_an_answer_is_a_line_that_openai_reads(tmp_path: Path) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    found = lines(
        tmp_path,
        ok(),
        ok(custom_id=None, text=None, tool_calls=calls, finish_reason="tool_calls"),
    )
    assert found[0] == (
        True,
        {
            "id": "batch_req_r1-0",
            "custom_id": "a",
            "response": {
                "status_code": 200,
                "request_id": "req_r1-0",
                "body": {
                    "id": "chatcmpl-r1-0",
                    "object": "chat.completion",
                    "created": int(MOMENT.timestamp()),
                    "model": "demo",
                    "choices": [
                        {
                            "index": 0,
                            "message": {"role": "assistant", "content": "four", "refusal": None},
                            "logprobs": None,
                            "finish_reason": "stop",
                        }
                    ],
                    "usage": {
                        "prompt_tokens": 9,
                        "completion_tokens": 2,
                        "total_tokens": 11,
                        "prompt_tokens_details": {"cached_tokens": 8},
                        "completion_tokens_details": {"reasoning_tokens": 0},
                    },
                },
            },
            "error": None,
        },
    )
    assert found[1][1]["custom_id"] == "row-1"
    for _, line in found:
        read = ChatCompletion.model_validate(line["response"]["body"], strict=True)
        assert read.usage is not None and read.usage.total_tokens == 11
    assert read.choices[0].message.tool_calls is not None
    assert read.choices[0].message.content is None


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("invalid_request", 400),
        ("context_length_exceeded", 400),
        ("model_not_found", 404),
        ("queue_full", 429),
        ("worker_lost", 500),
        ("a_code_of_the_future", 500),
    ],
)
def test_a_failed_request_has_the_response_of_a_server(
    tmp_path: Path, code: str, status: int
) -> None:
    ((is_answer, line),) = lines(tmp_path, failed(code))
    assert not is_answer
    assert line["error"] is None
    assert line["response"]["status_code"] == status
    error = ErrorObject.model_validate(line["response"]["body"]["error"], strict=True)
    assert error.message == "why"


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"status": "cancelled", "error_message": "why"}, "batch_cancelled"),
        (failed("timeout"), "batch_expired"),
        (failed("timeout", started_at=MOMENT), "request_timeout"),
    ],
)
def test_a_request_that_never_ran_has_no_response(
    tmp_path: Path, row: dict[str, Any], code: str
) -> None:
    ((is_answer, line),) = lines(tmp_path, row)
    assert not is_answer
    assert line["response"] is None
    assert line["error"] == {"code": code, "message": "why"}


def test_samples_and_choices_are_choices_of_one_line(tmp_path: Path) -> None:
    rows = [
        ok(row_index=3, repeat_index=repeat, choice_index=choice, job_id=f"j{repeat}", text=text)
        for repeat, choice, text in ((1, 0, "c"), (0, 1, "b"), (0, 0, "a"))
    ]
    rows.append(failed("internal", row_index=3, repeat_index=2))
    ((is_answer, line),) = lines(tmp_path, *rows)
    assert is_answer
    body = ChatCompletion.model_validate(line["response"]["body"])
    assert [(one.index, one.message.content) for one in body.choices] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
    ]
    assert body.usage is not None
    assert (body.usage.prompt_tokens, body.usage.completion_tokens) == (18, 6)


def test_log_probabilities_are_those_of_the_row(tmp_path: Path) -> None:
    tops = [
        [{"token": " four", "logprob": -0.5}, {"token": " 4", "logprob": -1.5}],
        [{"token": "\ufffd", "logprob": -0.25}],
    ]
    scored = {"tokens": [" four", "\ufffd"], "token_logprobs": [-0.5, -0.25]}
    found = lines(
        tmp_path,
        ok(**scored, top_logprobs=tops),
        ok(custom_id="b", **scored),
        ok(custom_id="c", token_logprobs=[-0.5, -0.25]),  # of an older version
    )
    bodies = [line["response"]["body"] for _, line in found]
    first, second, third = [
        ChatCompletion.model_validate(body, strict=True).choices[0].logprobs for body in bodies
    ]
    assert first is not None and first.content is not None
    four, part = first.content
    assert (four.token, four.bytes, four.logprob) == (" four", [*b" four"], -0.5)
    assert [(top.token, top.logprob) for top in four.top_logprobs] == [
        (" four", -0.5),
        (" 4", -1.5),
    ]
    assert (part.bytes, part.top_logprobs[0].bytes) == (None, None)
    assert second is not None and second.content is not None
    assert [token.top_logprobs for token in second.content] == [[], []]
    assert third is None


def test_lines_may_be_in_the_order_in_which_requests_have_ended(tmp_path: Path) -> None:
    """That of its last sample, where a request has several."""
    ends = {0: [3, 5], 1: [4, 1], 2: [2, 2]}
    rows = [
        ok(
            row_index=row,
            repeat_index=repeat,
            job_id=f"j{row}{repeat}",
            custom_id=f"c{row}",
            text=f"{row}{repeat}",
            finished_at=MOMENT + timedelta(seconds=seconds),
        )
        for row, both in ends.items()
        for repeat, seconds in enumerate(both)
    ]
    results = make_run(tmp_path, rows)
    found = [line.content for line in batch_lines(results, "r1", "done")]
    assert [line["custom_id"] for line in found] == ["c2", "c1", "c0"]
    texts = [one["message"]["content"] for one in found[0]["response"]["body"]["choices"]]
    assert texts == ["20", "21"]


def test_a_request_with_the_custom_id_of_another_is_named_by_its_row(tmp_path: Path) -> None:
    refused = failed("invalid_request", attempt=0, custom_id="a")
    found = lines(tmp_path, refused, ok(custom_id="b"), ok())
    assert [(is_answer, line["custom_id"]) for is_answer, line in found] == [
        (False, "row-0"),
        (True, "b"),
        (True, "a"),
    ]


def test_an_id_that_is_made_for_a_row_is_that_of_no_other(tmp_path: Path) -> None:
    refused = failed("invalid_request", attempt=0, custom_id="a")
    rows = (refused, ok(custom_id="row-0"), ok(custom_id=None), ok(custom_id="row-2-2"))
    found = lines(tmp_path, *rows, ok(custom_id="row-2"), ok())
    assert [line["custom_id"] for _, line in found] == [
        "row-0-2",
        "row-0",
        "row-2-3",
        "row-2-2",
        "row-2",
        "a",
    ]


def test_a_row_that_lacks_what_an_answer_must_have_is_a_line_that_openai_reads(
    tmp_path: Path,
) -> None:
    calls = [{"id": None, "type": None, "function": None}]
    for row in (
        {"custom_id": "a"},
        ok(finish_reason="other"),
        ok(tool_calls=calls, finish_reason=None, text=None),
    ):
        ((is_answer, line),) = lines(tmp_path, row)
        assert is_answer
        ChatCompletion.model_validate(line["response"]["body"], strict=True)


def test_each_request_is_in_one_file_once(tmp_path: Path) -> None:
    rows = [
        ok(custom_id=f"id{row}") if row % 3 else failed("internal", custom_id=f"id{row}")
        for row in range(30)
    ]
    results = make_run(tmp_path, rows[::-1])
    path = tmp_path / "out.jsonl"
    files = write_export(results, "r1", "openai-batch", path)
    assert [(one.path.name, one.rows) for one in files] == [
        ("out.jsonl", 20),
        ("out.errors.jsonl", 10),
    ]
    found = [
        [json.loads(line)["custom_id"] for line in one.path.read_text().splitlines()]
        for one in files
    ]
    assert [len(one) for one in found] == [20, 10]
    assert sorted(found[0] + found[1]) == sorted(f"id{row}" for row in range(30))
    make_run(tmp_path, [ok()])
    write_export(results, "r1", "openai-batch", path)
    assert (tmp_path / "out.errors.jsonl").read_text() == ""  # not that of the export before


@pytest.mark.parametrize("kept", range(4))
def test_an_output_file_is_never_beside_the_errors_of_another_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """It is killed before one of its changes of the file system."""
    path, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    results = make_run(tmp_path, [ok(custom_id="old"), failed("internal", custom_id="old2")])
    write_export(results, "r1", "openai-batch", path)
    make_run(tmp_path, [failed("internal", custom_id="new"), ok(custom_id="new2")])
    changes = 0

    def stopping(change: Any) -> Any:
        def changed(*words: Any, **options: Any) -> Any:
            nonlocal changes
            if changes == kept:
                raise KeyboardInterrupt
            changes += 1
            return change(*words, **options)

        return changed

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "replace", stopping(Path.replace))
        patch.setattr(Path, "unlink", stopping(Path.unlink))
        write_export(results, "r1", "openai-batch", path)
    ids = [
        json.loads(line)["custom_id"]
        for file in (path, errors)
        if path.exists()
        for line in file.read_text().splitlines()
    ]
    assert ids == ([["old", "old2"], [], [], ["new2", "new"]][kept])


def test_what_is_no_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="have the custom_id 'a'"):
        lines(tmp_path, ok(), ok())
    with pytest.raises(InvalidRequest, match="rows of the operation loglikelihood"):
        lines(tmp_path, ok(operation="loglikelihood"))
