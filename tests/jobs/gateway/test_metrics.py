"""/metrics of gateways: what is counted, that labels are few, and that the page lists them."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jobs import metrics_page
from jobs.gateway import figures
from jobs.gateway.figures import BOUNDS, FIGURES, RECEIVED, Figures, StreamFigures
from jobs.gateway.metrics import GatewayCollector
from jobs.metrics_page import MetricsPage
from jobs.store.job_state import Status
from tests.jobs.gateway.conftest import GatewayProcess, Start, chat
from tests.jobs.gateway.test_bad_input import HEAD, reply_to
from tests.waiting import wait_until
from tests.worker.site import Site

ROOT = Path(__file__).parents[3]
PATH = "/v1/chat/completions"


def metrics_of(gateway: GatewayProcess) -> list[Any]:
    with gateway.http() as http:
        reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    return list(text_string_to_metric_families(reply.text))


def values_of(gateway: GatewayProcess, name: str) -> dict[tuple[str, ...], float]:
    """The values of a metric, by the values of its labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in metrics_of(gateway)
        for sample in family.samples
        if sample.name == name
    }


def wait_for(gateway: GatewayProcess, name: str, wanted: dict[tuple[str, ...], float]) -> None:
    """Until a metric has these values: the page is made once a second at most."""
    wait_until(lambda: values_of(gateway, name).items() >= wanted.items())


def test_requests_are_counted_by_route_and_status(site: Site, start: Start) -> None:
    site.worker(lease_seconds=12)
    site.wait_for_workers()
    gateway = start()
    with gateway.http() as http:
        job = http.post(PATH, json=chat()).headers["x-request-id"]
        http.post(PATH, json=chat(top_p=2))
        http.put(PATH)
        http.get(f"{PATH}/{job}")
        for number in range(5):
            http.get(f"/nowhere/{number}")
            http.get(f"{PATH}/unknown-{number}")
    assert reply_to(gateway, b"no http\r\n\r\n")[0] == 400
    wait_for(
        gateway,
        "chatjobs_http_requests_total",
        {
            (PATH, "200"): 1,
            (PATH, "400"): 1,
            (PATH, "405"): 1,
            (PATH + "/{id}", "200"): 1,
            (PATH + "/{id}", "404"): 5,
            ("none", "404"): 5,
            ("none", "400"): 1,
        },
    )


def test_streams_are_counted_while_they_are_open(site: Site, start: Start) -> None:
    site.worker(delay=0.05, lease_seconds=12)
    site.wait_for_workers()
    gateway = start()
    received = 0
    with gateway.http() as http:
        body = chat(stream=True, metadata={"words": "100000"})
        with http.stream("POST", PATH, json=body) as reply:
            parts = reply.iter_raw()  # kept, since its end would close the connection
            while received < 1000:
                received += len(next(parts))
            wait_for(gateway, "chatjobs_http_streams_open", {(): 1})
    wait_for(gateway, "chatjobs_http_streams_open", {(): 0})
    assert values_of(gateway, "chatjobs_http_stream_bytes_total")[()] >= received
    assert values_of(gateway, "chatjobs_http_first_event_added_seconds_count") == {(): 1}
    added = values_of(gateway, "chatjobs_http_first_event_added_seconds_sum")[()]
    assert added > 0
    buckets = list(values_of(gateway, "chatjobs_http_first_event_added_seconds_bucket").values())
    assert buckets == sorted(buckets) and buckets[-1] == 1


def test_what_is_added_to_the_first_event_is_the_time_before_and_after_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 10.0
    monkeypatch.setattr(figures, "monotonic", lambda: now)
    counted = Figures()
    scope: Any = {FIGURES: counted, RECEIVED: now}
    now += 2.0  # until its job is in Redis
    stream = StreamFigures(scope)
    stream.sent(7)  # a comment, while the worker is busy
    for _ in range(2):
        now += 30.0
        stream.came()
        now += 0.25
        stream.sent(100)
    assert counted.added_sum == 2.25
    assert (counted.added[bisect_left(BOUNDS, 2.25)], sum(counted.added)) == (1, 1)
    assert counted.stream_bytes == 207


def test_a_client_that_leaves_before_its_reply_is_counted_as_499(site: Site, start: Start) -> None:
    site.worker(delay=0.05, lease_seconds=12)
    site.wait_for_workers()
    gateway = start()
    content = json.dumps(chat(metadata={"words": "100000"}, job={"id": "mine"})).encode()
    with gateway.connect() as connection:
        connection.sendall(f"{HEAD}content-length: {len(content)}\r\n\r\n".encode() + content)
        wait_until(lambda: site.client.job("mine").status() is Status.STARTED)
    wait_for(gateway, "chatjobs_http_requests_total", {(PATH, "499"): 1})


def test_a_page_is_made_once_in_its_time_for_each_format(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Figures()
    page = MetricsPage(GatewayCollector(counted))
    monkeypatch.setattr(metrics_page, "PAGE_SECONDS", math.inf)
    first = page.render("")
    counted.streams = 7
    assert page.render("") == first
    assert b"chatjobs_http_streams_open 7.0" in page.render("application/openmetrics-text")[0]
    monkeypatch.setattr(metrics_page, "PAGE_SECONDS", 0.0)
    assert b"chatjobs_http_streams_open 7.0" in page.render("")[0]


def test_the_page_needs_no_key_and_names_no_tenant(
    site: Site, start: Start, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.acme]\nkeys = ["sk-1"]\n', encoding="utf-8")
    gateway = start("--api-key-file", str(keys))
    with gateway.http(authorization="Bearer sk-1") as http:
        assert http.get("/v1/models").status_code == 200
    with gateway.http() as http:
        assert http.get("/v1/models").status_code == 401
    wait_for(gateway, "chatjobs_http_requests_total", {("/v1/models", "401"): 1})
    families = metrics_of(gateway)
    labels = {name for one in families for sample in one.samples for name in sample.labels}
    assert labels <= {"handler", "status", "le", "version"}


def test_the_documentation_has_each_metric(site: Site, start: Start) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = page.partition("\n## Of a gateway\n")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `(chatjobs_\w+)` ", section, re.MULTILINE))
    exposed = {
        f"{one.name}_total" if one.type == "counter" else one.name
        for one in metrics_of(start())
        if one.name.startswith("chatjobs_")
    }
    assert documented == exposed
