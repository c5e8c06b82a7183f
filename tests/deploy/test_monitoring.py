"""The files of deploy/ have the form that Grafana and Prometheus load.

Whether the metrics that they name exist is tested beside the metrics (tests/worker/monitoring).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
DURATION = re.compile(r"([0-9]+(ms|s|m|h|d))+")


def test_the_dashboard_has_the_form_of_grafana() -> None:
    board = json.loads((DEPLOY / "grafana/chatjobs.json").read_text(encoding="utf-8"))
    assert {"title", "uid", "schemaVersion", "templating", "time", "panels"} <= board.keys()
    variables = {one["name"] for one in board["templating"]["list"]}
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert {"refId", "expr", "legendFormat"} <= target.keys()
            assert _is_balanced(target["expr"]), target["expr"]
            named = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert named <= variables, target["expr"]


def test_the_alerts_have_the_form_of_prometheus() -> None:
    file = yaml.safe_load((DEPLOY / "prometheus/chatjobs.rules.yml").read_text(encoding="utf-8"))
    (group,) = file["groups"]
    assert file.keys() == {"groups"} and group.keys() == {"name", "rules"}
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) >= 10
    for rule in group["rules"]:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert DURATION.fullmatch(rule.get("for", "1m")), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} == rule["annotations"].keys()
        assert _is_balanced(rule["expr"]), rule["expr"]


def test_an_alert_comes_if_no_worker_can_be_scraped() -> None:
    """Then there is no series, and a sum over none is no value."""
    file = yaml.safe_load((DEPLOY / "prometheus/chatjobs.rules.yml").read_text(encoding="utf-8"))
    expressions = {rule["alert"]: rule["expr"] for rule in file["groups"][0]["rules"]}
    assert "or vector(0)" in expressions["ChatjobsNoReadyWorker"]


def _is_balanced(expression: str) -> bool:
    """True if each bracket of a query is closed."""
    bare = re.sub(r'"[^"]*"', "", expression)
    while (
        shorter := re.sub(r"\([^(){}\[\]]*\)|\{[^(){}\[\]]*\}|\[[^(){}\[\]]*\]", "", bare)
    ) != bare:
        bare = shorter
    return not set(bare) & set("(){}[]")
