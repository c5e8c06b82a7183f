"""The formats of the page for Prometheus."""

from __future__ import annotations

import pytest

from jobs.metrics_page import MetricsPage

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/plain;version=x.y", TEXT),
        ("text/plain;version=1.0.0;escaping=a\nb", TEXT),
        ("text/html, application/openmetrics-text", OPEN),
        ("application/openmetrics-text; version=x.y", OPEN),
        ("application/openmetrics-text; version=1.0.7; escaping=x", OPEN),
        # Prometheus 3:
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2", OPEN),
    ],
)
def test_nothing_of_a_request_is_in_the_reply(accept: str, content_type: str) -> None:
    body, found = MetricsPage().render(accept)
    assert found == content_type
    assert b"process_resident_memory_bytes" in body
    assert body.endswith(b"# EOF\n") == (found == OPEN)
