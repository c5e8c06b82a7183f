"""`chatjobs run --mode`: rows that are scored, and completions, with the demo model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from jobs import keys
from jobs.api.score_request import ScoreRequest
from jobs.data_sets.conventions import with_conventions
from jobs.data_sets.data_set import DataSet, choices_in
from jobs.data_sets.requests import Overrides
from jobs.data_sets.row_templates import RowTemplate
from tests.cli.conftest import Run
from tests.worker.site import Site

Go = Callable[..., Result]


@pytest.fixture
def go(run: Run, site: Site) -> Go:
    """`go(rows, "choice", "--run", "r1")`."""

    def call(rows: Sequence[Any], mode: str, *words: str) -> Result:
        file = site.folder.parent / f"{mode}.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        places = ("--redis", site.url, "--results", str(site.folder), "--quiet")
        return run("run", str(file), "--mode", mode, "-m", "demo", *places, *words)

    return call


def rows_of(site: Site, run: str) -> list[Any]:
    order = ("row_index", "choice_index")
    return sorted(site.rows(run), key=lambda row: [row[name] for name in order])


def test_each_mode_gives_the_rows_of_a_data_set(go: Go, run: Run, site: Site) -> None:
    site.worker(real=True, models=["demo"])
    choices = [
        {"question": "What is 2 + 3?", "choices": ["5", "apple pear"], "answer": 0},
        {"question": "What is 2 + 3?", "choices": ["5"], "answer": "Z"},
        {"question": "2 + 3? " * 1500, "choices": ["5", "6"], "answer": "A"},
        {"question": "What is 4 + 3?", "choices": ["1", "7"], "answer": "7", "id": 9},
    ]
    site.wait_for_workers()  # a pilot asks one that serves
    planned = go(choices, "choice", "--keep", "id", "--dry-run", "--json")
    assert planned.exit_code == 1, planned.exc_info
    found = json.loads(planned.stdout)
    assert found["left"] == 2
    assert found["errors"] == {"invalid_request": 1, "context_length_exceeded": 1}
    check_plan(found, rows=2)
    assert found["first_prompt"] == "What is 2 + 3? 5"
    first = go(choices, "choice", "--keep", "id")
    assert (first.exit_code, first.stdout) == (
        1,
        "choice-choice-demo: 4 in, 4 rows, 0 missing, 0 twice, 2 failed\n",
    ), first.stderr
    rows = rows_of(site, "choice-choice-demo")
    assert [row["error_type"] for row in rows] == [
        *(None, "invalid_request", "context_length_exceeded", None)
    ]
    assert rows[1]["error_message"].startswith("line 2: field 'answer': 'Z' is none of the 1")
    assert [row["operation"] for row in rows] == ["choice"] * 4
    assert [row["target"] for row in rows] == ["5", None, "5", "7"]
    assert [(one["text"], one["scored_bytes"]) for one in rows[3]["choices"]] == [
        (" 1", 1),
        (" 7", 1),
    ]
    assert json.loads(rows[3]["metadata"]) == {"id": "9"}
    again = go(choices, "choice", "--keep", "id", "--retry-failed")
    assert (again.exit_code, again.stdout) == (1, first.stdout)
    retried = rows_of(site, "choice-choice-demo")
    kept = [old["job_id"] == new["job_id"] for old, new in zip(rows, retried, strict=True)]
    assert kept == [True, True, False, True]  # an error row of the data set has a fixed id

    likelihoods = [
        {"prompt": f"Sort {n}: pear fig", "continuations": ["fig", "pear", "kiwi"]}
        for n in range(3)
    ]
    planned = go(likelihoods, "loglikelihood", "--run", "l", "--dry-run", "--json")
    found = json.loads(planned.stdout)
    assert (planned.exit_code, found["pilot"]["failed"]) == (0, 0), planned.stderr
    check_plan(found, rows=3)
    assert len({row["job_id"] for row in site.rows("l-pilot")}) == 1  # a pack, as in the run
    done = go(likelihoods, "loglikelihood", "--run", "l")
    assert (done.exit_code, done.stdout) == (
        0,
        "l: 3 in, 3 rows with 9 choices, 0 missing, 0 twice, 0 failed\n",
    ), done.stderr
    assert [(row["row_index"], row["choice_index"]) for row in rows_of(site, "l")] == [
        (row, choice) for row in range(3) for choice in range(3)
    ]
    other = go(likelihoods, "choice", "--run", "l", "--map", "continuations=choices")
    assert other.exit_code == 2
    assert 'mode: "loglikelihood" → "choice"' in other.stderr

    texts = [{"text": "One apple and two pears. " * 9}, {"text": "fig"}]
    words = ("perplexity", "--run", "p", "-o", "window=32", "-o", "stride=16")
    check_plan(json.loads(go(texts, *words, "--dry-run", "--json").stdout), rows=2)
    done = go(texts, *words)
    assert (done.exit_code, done.stdout[:16]) == (0, "p: 2 in, 2 rows,"), done.stderr

    results = ("--results", str(site.folder), "--json")
    metrics = ("--metric", "choice:sum", "--metric", "choice:characters", "--metric", "choice")
    scored = run("score", "choice-choice-demo", *metrics, *results)
    found = [json.loads(line) for line in scored.stdout.splitlines()]
    assert {one["metric"]: one["scored"] for one in found} == dict.fromkeys(metrics[1::2], 2)
    scored = run("score", "p", "--metric", "perplexity", *results)
    rows = rows_of(site, "p")
    assert json.loads(scored.stdout)["value"] == pytest.approx(
        2.718281828
        ** -(sum(r["logprob_sum"] for r in rows) / sum(r["scored_tokens"] for r in rows))
    )

    done = go([{"prompt": "Hello"}], "completion", "--run", "c", "--max-tokens", "3")
    assert done.exit_code == 0, done.stderr
    (row,) = site.rows("c")
    assert (row["prompt"], row["messages"]) == ("Hello", None)
    assert row["input_tokens"] < 8 and row["output_tokens"] <= 3
    left = [key.decode() for key in site.redis.keys("*")]
    kinds = ("chatjobs:rows:", "chatjobs:producer:", "rq:job:", "rq:results:")
    found = [key for key in left if key.startswith(kinds)]
    assert [
        key for key in found if not key.startswith(("rq:job:pilot-", "rq:results:pilot-"))
    ] == []


def check_plan(found: Any, rows: int) -> None:
    """A pilot of all rows has measured, and its tokens are those of the model's own tokenizer."""
    tokens, pilot = found["tokens"], found["pilot"]
    assert tokens["rows"] == pilot["rows"] == rows
    assert tokens["mean"] * rows == pytest.approx(pilot["input_tokens"])
    assert (pilot["output_tokens"], pilot["failed"]) == (0, 0)
    assert 0 < pilot["scored_tokens"] <= pilot["input_tokens"]
    assert found["seconds"] == pytest.approx(pilot["seconds"]) and found["seconds"] > 0


def test_a_template_makes_the_choices_of_each_row(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    rows = [
        {"input": "Which?\nOptions:\n(A) one\n(B) two", "target": "(B)", "task": "which"},
        {"input": "Without options.", "target": "(B)", "task": "which"},
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    overrides = with_conventions(Overrides("m", "r", ignore_unknown=True, mode="choice"), [file])
    choices = RowTemplate(
        "{% for line in input.splitlines() if line.startswith('(') %}{{ line[:3] }}\n{% endfor %}",
        overrides.names,
        "template of choices",
    )
    with DataSet([file], overrides, choices=choices) as source:
        first, second = [one for one in source.read(lambda _: True) if one is not None]
    assert isinstance(first.request, ScoreRequest)
    (item,) = first.request.items
    assert (item["choices"], item["target"]) == ([" (A)", " (B)"], "(B)")
    assert item["metadata"] == {"task": "which"}  # as of a chat
    assert second.error is not None
    assert "the template of choices makes none for this row" in second.error.message


def test_a_template_may_write_the_choices_as_json() -> None:
    assert choices_in(' ["a\\nb", 2]') == ["a\nb", 2]
    assert choices_in("[a]\n\n [b] ") == ["[a]", "[b]"]


def test_no_row_is_scored_while_a_worker_serves_the_model_that_can_not(go: Go, site: Site) -> None:
    status = {
        **{"name": "old", "host": "h", "device": "cpu", "paused": "", "models": ["demo"]},
        **{"names": ["demo"], "memory": {"weights": 1, "cache": 1}, "running": 0},
        **{"tokens_per_second": 0.0, "funcs": ["worker.tasks.chat_completion"]},
    }
    site.redis.zadd(keys.WORKERS, {"old": 2**52})
    site.redis.set(keys.worker("old"), json.dumps(status))
    refused = go([{"text": "a"}], "perplexity")
    assert refused.exit_code == 3
    assert "1 worker that serves 'demo' can't score (old): update chatjobs there" in refused.stderr
    assert not list(site.redis.scan_iter("rq:job:*"))
    site.redis.delete(keys.WORKERS, keys.worker("old"))


def test_options_without_meaning_in_a_mode_are_refused(go: Go) -> None:
    for mode, words, sentence in (
        ("choice", ("--max-tokens", "5"), "--max-tokens is for answers"),
        ("choice", ("--num-samples", "2"), "--num-samples is for answers"),
        ("perplexity", ("-o", "temperature=0"), "unknown field 'temperature'"),
        ("perplexity", ("--delimiter", " "), "--mode perplexity puts nothing behind a prompt"),
        ("chat", ("--choices", __file__), "--choices needs --mode choice"),
        ("chat", ("-o", "window=3"), "unknown field 'window'"),
        ("completion", ("-o", "apply_chat_template=true"), "is set by --mode completion"),
    ):
        result = go([{"prompt": "a", "text": "b", "choices": ["c"]}], mode, *words)
        assert result.exit_code == 2
        assert sentence in result.stderr
