"""`chatjobs score --metric judge:MODEL`: another model grades the answers, each once."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, Spawn
from tests.jobs.scores.runs import answers, make_run
from tests.worker.site import Site, wait_until

PAIRS = (("GRADE: C", "a"), ("it is 7/10", "b"), ("no idea", "c"), (None, "d"), ("GRADE: I", "e"))
ASK = "Grade this.\nsay {{ text }}"  # the fake model answers with the answer


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    site = Site(redis_url, tmp_path / "results")
    make_run(site.folder, answers(*PAIRS))
    yield site
    site.close()


def words(site: Site, template: str, *more: str) -> list[str]:
    """The command with a template, for the answers of run r1."""
    file = site.folder.parent / "grade.jinja"
    file.write_text(template)
    places = ("--redis", site.url, "--results", str(site.folder))
    return ["score", "r1", "--metric", f"judge:fake:{file}", *places, *more]


def asked(site: Site) -> list[Any]:
    """The rows of the judge's runs."""
    names = [name for name in site.results.runs() if name.startswith("r1.judge-")]
    return [row for name in names for row in site.rows(name)]


def ends(rows: list[Any]) -> set[tuple[str, Any]]:
    """Of the judge's jobs: one that is asked again has the same id, and another time."""
    return {(row["job_id"], row["finished_at"]) for row in rows}


def test_each_answer_is_graded_once(run: Run, site: Site) -> None:
    site.worker()
    done = run(*words(site, ASK, "--json"))
    assert done.exit_code == 1
    facts = json.loads(done.stdout)
    assert (facts["value"], facts["rows"], facts["scored"]) == (0.5, 5, 2)
    assert (facts["no_answer"], facts["errors"]) == (1, 2)
    assert "row 2: the judge gave no grade; its answer ends with 'no idea'" in done.stderr
    scores = {row["row_index"]: row for row in site.results.scores("r1").to_pylist()}
    assert [(scores[n]["status"], scores[n]["value"]) for n in range(5)] == [
        ("ok", 1.0),
        ("error", None),
        ("error", None),
        ("no_answer", None),
        ("ok", 0.0),
    ]
    assert (scores[0]["label"], scores[0]["explanation"].strip()) == ("C", "GRADE: C")
    first = asked(site)
    questions = [row["messages"][0]["content"] for row in first if row["status"] == "ok"]
    assert sorted(questions) == sorted(f"Grade this.\nsay {text}" for text, _ in PAIRS if text)

    again = run(*words(site, ASK, "--json"))
    assert json.loads(again.stdout) == facts
    assert ends(asked(site)) == ends(first)

    rows = answers(*PAIRS)  # the failed row was run again, and another answer replaced
    rows[3] |= {"status": "ok", "text": "GRADE: P", "job_id": "retried"}
    rows[4] |= {"text": "GRADE: C", "attempt": 2}
    make_run(site.folder, rows)
    third = json.loads(run(*words(site, ASK, "--json")).stdout)
    assert (third["value"], third["scored"], third["no_answer"]) == (2.5 / 3, 3, 0)
    assert len(ends(first) & ends(asked(site))) == 3
    shown = run("score", "r1", "--results", str(site.folder))  # without Redis
    assert shown.stdout.splitlines()[1].startswith("judge:fake:")

    fails = run(*words(site, "say GRADE: {{ 'C' if target != 'e' else text[99] }}"))
    assert fails.exit_code == 1
    assert "row 4: the judge failed: row 4: the prompt template fails on these" in fails.stderr
    assert fails.stdout.splitlines()[1].split()[1] == "1.0000"


def test_a_killed_command_goes_on_and_a_model_that_nobody_serves_is_named(
    run: Run, spawn: Spawn, site: Site
) -> None:
    killed = spawn(*words(site, ASK))
    assert killed.stderr is not None
    for line in killed.stderr:
        if "no worker serves 'fake'" in line:
            break
    else:
        pytest.fail("the command ended")
    before = {job for job in map(bytes.decode, site.redis.lrange("rq:queue:bulk:fake", 0, -1))}
    assert len(before) == 4
    killed.kill()
    killed.communicate()
    waiting = spawn(*words(site, ASK))  # takes the lease of the dead process
    site.worker()
    assert waiting.wait(timeout=120) == 1
    assert {row["job_id"] for row in asked(site) if row["status"] == "ok"} == before
    waiting.communicate()


def test_ctrl_c_says_how_to_go_on(spawn: Spawn, site: Site) -> None:
    make_run(site.folder, answers(*PAIRS[:3]))
    process = spawn(*words(site, ASK))
    wait_until(lambda: site.redis.llen("rq:queue:bulk:fake") == 3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "this goes on: chatjobs score r1 --metric judge:fake:" in errors
    assert site.redis.llen("rq:queue:bulk:fake") == 0


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ text", "the prompt template is not valid Jinja"),
        ("{{ nothing }}", "no answer can be judged: the prompt template fails"),
    ],
)
def test_a_template_that_no_answer_fits_is_refused(
    run: Run, site: Site, template: str, sentence: str
) -> None:
    done = run(*words(site, template))
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert not site.redis.keys("rq:queue:*")


def test_options_that_can_not_be_are_refused(run: Run, site: Site) -> None:
    for more, sentence in (
        (("-o", "top_p=2"), "no answer can be judged: top_p"),
        (("-o", "n=2"), "n is set by"),
    ):
        done = run(*words(site, ASK, *more))
        assert (done.exit_code, sentence in done.stderr) == (2, True), done.stderr
    plain = run("score", "r1", "-m", "exact", "-o", "top_p=1", "--results", str(site.folder))
    assert (plain.exit_code, "-o" in plain.stderr) == (2, True)


def test_a_judge_gets_the_targets_of_a_file_and_is_asked_again_about_others(
    run: Run, site: Site
) -> None:
    site.worker()
    file = site.folder.parent / "late.csv"
    template = "say GRADE: {{ target }}"
    values = []
    for grades in ("CCICC", "CCCCC", "CCICC"):
        lines = (f"{row},{grade}" for row, grade in enumerate(grades))
        file.write_text("\n".join(["row_index,target", *lines]))
        done = run(*words(site, template, "--target", str(file), "--json"))
        values.append(json.loads(done.stdout)["value"])
    assert values == [0.75, 1.0, 0.75]
    assert len(ends(asked(site))) == 10  # the third call asks nothing
