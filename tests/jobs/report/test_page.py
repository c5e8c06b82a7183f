"""The page of a report: what it says of runs of every kind, and that it escapes what they hold."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jobs import Results
from jobs.errors import InvalidRequest
from jobs.report.contents import read_contents
from jobs.report.page import render
from jobs.results.run_json import RunJson
from tests.jobs.report.runs import failed, large_run, noted, scored, timed
from tests.jobs.scores.runs import make_run

MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
VOID = {"meta", "img", "br", "link", "input"}


class Tags(HTMLParser):
    """The tags, attributes and text of a page; fails where a tag is closed that is not open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.ids: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(results: Results, *runs: str, by: tuple[str, ...] = ()) -> Tags:
    return Tags(render(read_contents(results, runs, by)))


def test_everything_that_a_run_holds_is_escaped(tmp_path: Path) -> None:
    messages = [{"role": MARKUP, "content": MARKUP, "reasoning_content": MARKUP}]
    row = timed(
        0,
        1,
        model="<b>model</b>",
        messages=messages,
        text=MARKUP,
        target=MARKUP,
        custom_id=MARKUP,
        metadata='{"level": "</td><script>"}',
        device_name=MARKUP,
        tools=MARKUP,
        finish_reason=MARKUP,
        tool_calls=[{"id": "1", "function": {"name": MARKUP, "arguments": MARKUP}}],
    )
    make_run(tmp_path, [row, failed(MARKUP, f"{MARKUP}\x00\u202e", custom_id="<i>")])
    noted(tmp_path, "r1", rows_in=2, template=MARKUP, **{MARKUP: MARKUP})
    scored(tmp_path, "r1", "exact", [1.0])
    page = page_of(Results(tmp_path), "r1", by=("level",))
    assert not {"script", "img", "b>model", "i>"} & page.tags
    assert (
        not {name for name in page.attributes if name.startswith("on")} | {"src"} & page.attributes
    )
    for text in (MARKUP, "<b>model</b>", "level: </td><script>", "\\u202e", "\u2400"):
        assert text in page.text, text


def test_charts_are_drawn_for_runs_beside_each_other(tmp_path: Path) -> None:
    large_run(tmp_path, "one")
    large_run(tmp_path, "two", rows=20, dtype="bfloat16")
    assert render(read_contents(Results(tmp_path), ["one"])).count("<svg ") == 8
    text = render(read_contents(Results(tmp_path), ["one", "two"], ["level"], price_per_hour=36))
    page = Tags(text)
    assert text.count("<svg ") == 8
    assert len(set(page.ids)) == len(page.ids)  # drawings share the page
    colours = set(re.findall(r'(?:fill|stroke)="([^"]*)"', text))
    assert all(one in ("none", "transparent") or one.startswith("var(--") for one in colours)
    assert {"var(--run-1)", "var(--run-2)"} <= colours
    for words in (
        "one: The audit holds.",
        "40 in, 40 rows, 0 missing, 0 twice, 0 failed",
        "level: easy",
        "0.4875",  # the mean of 0, 0.5 and 1 over 40 rows
        "at 36 per worker and hour",
        "options.temperature",
    ):
        assert words in page.text, words
    assert "style-src 'unsafe-inline'" in text and "http" not in text.replace(
        "http://www.w3.org/", ""
    ).replace("http-equiv", "")


def test_the_price_is_that_of_the_busy_time(tmp_path: Path) -> None:
    results = make_run(tmp_path, [timed(0, 10), timed(20, 10)])
    facts = {
        one.label: one.cells for one in read_contents(results, ["r1"], price_per_hour=3.6).facts
    }
    assert facts["Worker time"] == ("20.0 s",)
    assert facts["Worker time per 1,000 rows"] == ("2 h 47 min",)
    assert facts["Price per 1,000 rows"] == ("10.0",)


def test_runs_without_scores_charts_or_answers_have_a_page(tmp_path: Path) -> None:
    make_run(tmp_path, [failed("timeout", "too slow")] * 25, "failed")
    make_run(tmp_path, [timed(0, 1)], "one")
    make_run(tmp_path, [timed(0, 1)], "going")
    RunJson({"run_id": "going", "state": "interrupted"}).write(tmp_path / "going")
    make_run(tmp_path, [timed(0, 1)], "missing")
    noted(tmp_path, "missing", rows_in=3)
    make_run(tmp_path, [{"text": "b", "prompt": "a text", "operation": "perplexity"}], "text")
    results = Results(tmp_path)
    text = page_of(results, "failed").text
    for words in (
        "No audit.",
        "has no scores yet",
        "No row was started",
        "100 %",
        "first 20 of 25",
    ):
        assert words in text, words
    assert "Worker time per" not in text  # no fact without a value
    text = page_of(results, "going", "missing", "one", "text").text
    for words in (
        "going: Not complete (interrupted).",
        "missing: The audit does not hold.",
        "3 in, 1 rows, 2 missing",
        "These runs have no scores yet",
        "Too few rows for a curve",
        "a text",
    ):
        assert words in text, words


def test_a_long_prompt_keeps_its_start_and_its_end(tmp_path: Path) -> None:
    content = f"start{'x' * 100_000}end"
    results = make_run(tmp_path, [timed(0, 1, messages=[{"role": "user", "content": content}])])
    text = render(read_contents(results, ["r1"]))
    assert "… 98,008 characters …" in text
    assert "startxxx" in text and "xxxend" in text
    assert len(text) < 40_000


def test_what_can_not_be_reported_is_refused(tmp_path: Path) -> None:
    results = make_run(tmp_path, [timed(0, 1)])
    RunJson({"run_id": "empty"}).write(tmp_path / "empty")
    for runs, by, sentence in (
        (["none"], (), "no run 'none'"),
        (["r1", "empty"], (), "run empty has no rows"),
        (["r1"], ("topic",), "run r1 has no column 'topic'"),
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            read_contents(results, runs, by)
    (tmp_path / "r1/run.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"r1/run\.json is not JSON"):
        read_contents(results, ["r1"])


def test_text_that_utf_8_can_not_hold_is_shown_as_escapes(
    tmp_path: Path,
) -> None:
    results = make_run(tmp_path, [timed(0, 1)])
    noted(tmp_path, "r1", rows_in=1, prompt="\ud800")
    text = render(read_contents(results, ["r1"]))
    assert r"\ud800" in text and text.encode()


def test_a_mixture_of_models_is_named(tmp_path: Path) -> None:
    rows = [timed(place, 1, model_fingerprint=weights) for place, weights in enumerate("aab")]
    make_run(tmp_path, rows, "mixed")
    make_run(tmp_path, rows[:2], "plain")
    text = page_of(Results(tmp_path), "mixed", "plain").text
    assert "(weights a: 2 rows; weights b: 1 row): its figures are of a mixture." in text
    assert text.count("Several versions of a model") == 1
