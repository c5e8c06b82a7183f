"""Spans of jobs and rows: in the trace of their caller, and nothing without OTEL_* variables."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jobs.tracing import EXPORTERS, Tracing, open_tracing
from tests.waiting import PATIENCE
from tests.worker.site import ROOT, Site

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Takes the spans of workers in this process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("worker.service.open_tracing", lambda: Tracing(provider))
    return exporter


def spans_of(exporter: InMemorySpanExporter) -> dict[str, Any]:
    """The spans by their names, each of which is there once."""
    spans = exporter.get_finished_spans()
    found = {span.name: span for span in spans}
    assert len(found) == len(spans)
    return found


def submit(site: Site, **fields: Any) -> str:
    """Submit a job with these fields, and those of its metadata."""
    metadata = {
        name: fields.pop(name) for name in ("traceparent", "words", "fail") if name in fields
    }
    messages: Any = [{"role": "user", "content": "hello"}]
    request: Any = {"model": "fake", "messages": messages, "metadata": metadata, **fields}
    return site.client.submit(request).id


def test_the_spans_of_a_job_are_in_the_trace_of_its_caller(
    site: Site, exporter: InMemorySpanExporter
) -> None:
    options = {"temperature": 0.5, "seed": 7, "max_tokens": 9, "job": {"run": "r1"}}
    job = submit(site, traceparent=PARENT, words="3", **options)
    site.burst()
    spans = spans_of(exporter)
    assert set(spans) == {"chat fake", "queued", "prefill", "decode", "record"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    whole, queued, prefill = spans["chat fake"], spans["queued"], spans["prefill"]
    decode, record = spans["decode"], spans["record"]
    assert {f"{one.parent.span_id:016x}" for one in (whole, record)} == {SPAN}
    assert {one.parent.span_id for one in (queued, prefill, decode)} == {whole.context.span_id}
    assert (whole.kind, queued.kind) == (SpanKind.CONSUMER, SpanKind.INTERNAL)
    assert (whole.start_time, queued.end_time) == (queued.start_time, prefill.start_time)
    assert (prefill.end_time, decode.end_time) == (decode.start_time, whole.end_time)
    assert whole.start_time <= queued.end_time <= decode.start_time <= record.end_time
    found = dict(whole.attributes)
    assert found.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert found.pop("chatjobs.worker")
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "chatjobs",
        "gen_ai.request.model": "fake",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.output_tokens": 3,
        "chatjobs.job.id": job,
        "chatjobs.run": "r1",
        "chatjobs.attempt": 1,
    }
    assert dict(record.attributes) == {"chatjobs.job.id": job, "chatjobs.run": "r1"}
    (row,) = site.rows("r1")
    assert json.loads(row["metadata"])["traceparent"] == PARENT


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
    ],
)
def test_a_wrong_traceparent_is_ignored_and_a_trace_begins(
    site: Site, exporter: InMemorySpanExporter, wrong: str | None
) -> None:
    submit(site, **({} if wrong is None else {"traceparent": wrong}))
    site.burst()
    spans = spans_of(exporter)
    assert set(spans) == {"chat fake", "queued", "prefill", "decode"}  # rows have no trace
    assert spans["chat fake"].parent is None
    (trace,) = {span.context.trace_id for span in spans.values()}
    assert f"{trace:032x}" != TRACE


def test_a_caller_that_is_not_sampled_has_no_span(
    site: Site, exporter: InMemorySpanExporter
) -> None:
    submit(site, traceparent=f"00-{TRACE}-{SPAN}-00")
    site.burst()
    assert not exporter.get_finished_spans()


def test_the_span_of_a_failed_job_has_its_code(site: Site, exporter: InMemorySpanExporter) -> None:
    submit(site, traceparent=PARENT, fail="context_length_exceeded")
    site.burst()
    whole = spans_of(exporter)["chat fake"]
    assert whole.status.status_code is StatusCode.ERROR
    assert whole.attributes["error.type"] == "context_length_exceeded"


def test_a_job_that_is_refused_was_queued_only(site: Site, exporter: InMemorySpanExporter) -> None:
    job = submit(site, traceparent=PARENT)
    text = '["worker.tasks.chat_completion", null, [], {"request": {"seed": "\\ud800"}}]'
    site.redis.hset(f"rq:job:{job}", "data", text)
    site.burst()
    spans = spans_of(exporter)
    assert set(spans) == {"chat fake", "queued"}
    assert spans["chat fake"].attributes["error.type"] == "invalid_request"
    assert spans["chat fake"].parent is None  # its request can't be read


def test_a_worker_process_exports_as_its_variables_say(site: Site) -> None:
    submit(site, traceparent=PARENT)
    options = {"redis_url": site.url, "results": str(site.folder), "burst": True}
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.fake_worker", json.dumps(options)],
        cwd=ROOT,
        env={**os.environ, EXPORTERS: "console", "OTEL_RESOURCE_ATTRIBUTES": "deployment=test"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    spans, text = [], done.stdout.strip()
    while text:
        span, end = json.JSONDecoder().raw_decode(text)
        spans.append(span)
        text = text[end:].strip()
    assert {one["name"] for one in spans} == {"chat fake", "queued", "prefill", "decode", "record"}
    assert {one["context"]["trace_id"] for one in spans} == {f"0x{TRACE}"}
    resource = spans[0]["resource"]["attributes"]
    assert (resource["service.name"], resource["deployment"]) == ("chatjobs", "test")


@pytest.mark.parametrize(
    "variables", [{}, {EXPORTERS: "none"}, {EXPORTERS: "console", "OTEL_SDK_DISABLED": "true"}]
)
def test_nothing_is_imported_unless_variables_ask_for_spans(variables: dict[str, str]) -> None:
    code = (
        "import sys, worker.service, jobs.record.process\n"
        "from jobs.tracing import open_tracing\n"
        "before = set(sys.modules)  # redis-py has imported the package for figures of its own\n"
        "assert open_tracing() is None\n"
        "assert set(sys.modules) == before\n"
        "assert 'opentelemetry.sdk.trace' not in before\n"
    )
    environment = {**os.environ, **variables}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


@pytest.mark.parametrize(
    ("exporters", "missing", "message"),
    [
        ("console", "opentelemetry", "OpenTelemetry is not installed (pip install"),
        ("console", "opentelemetry.sdk.trace", "OpenTelemetry is not installed (pip install"),
        ("console,zipkin", "", "no exporter 'zipkin' (installed: console"),
    ],
)
def test_spans_that_cannot_be_exported_are_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    exporters: str,
    missing: str,
    message: str,
) -> None:
    monkeypatch.setenv(EXPORTERS, exporters)
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    with caplog.at_level(logging.WARNING):
        assert open_tracing() is None
    assert f"spans are not exported, which {EXPORTERS} asks for: {message}" in caplog.text
