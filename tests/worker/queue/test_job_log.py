"""The log has a line for each failed job and each retry, which programs can read."""

from __future__ import annotations

import json
import logging

import pytest

from jobs.log_lines import JsonFormatter
from tests.worker.site import Site


def test_each_failed_job_and_each_retry_has_one_line(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worker")
    site.submit(run="r", words=2)
    failed = site.submit(run="r", first_row=1, fail="internal", retries=1)
    refused = site.submit("\x1b[2J\nb", run="r", first_row=2, refuse=True)
    cancelled = site.submit(run="r", first_row=3, fail="cancelled")
    site.burst()
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    about = [line for line in lines if "job" in line]
    assert sorted((line["job"], line["level"], line["code"]) for line in about) == sorted(
        [
            (refused.id, "info", "context_length_exceeded"),
            (failed.id, "info", "internal"),  # the retry
            (failed.id, "warning", "internal"),
        ]
    )
    assert cancelled.id not in caplog.text
    (last,) = (line for line in about if line["level"] == "warning")
    assert last.keys() == {
        *("time", "level", "logger", "message", "job", "run", "model", "code", "attempt"),
    }
    assert (last["run"], last["model"], last["attempt"]) == ("r", "fake", 2)
    assert last["message"] == f"job {failed.id} failed: internal: requested by the test"


def test_an_exception_is_part_of_its_line() -> None:
    try:
        raise ValueError("\x1b[2J\nné")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
        record = logging.LogRecord("worker.x", logging.ERROR, "f", 1, "a %s", ("b",), info)
    text = JsonFormatter().format(record)
    assert text.isascii() and text.isprintable()
    line = json.loads(text)
    assert (line["level"], line["logger"], line["message"]) == ("error", "worker.x", "a b")
    assert line["exception"].endswith("ValueError: \x1b[2J\nné")
    assert line["time"].endswith("+00:00")
