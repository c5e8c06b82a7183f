"""The questions to a judge: each sample keeps its number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.data_sets.row_templates import BrokenTemplate
from jobs.errors import InvalidRequest
from jobs.runs.judge_run import Questions
from jobs.scores.judge import Judge
from tests.jobs.scores.runs import answers, make_run


def numbers(questions: Questions) -> dict[int, int]:
    """The number of the question about each row."""
    found: dict[int, int] = {}
    for one in questions.read(lambda number: True):
        assert one is not None
        found[int(metadata(one)["row_index"])] = one.number
    return found


def metadata(one: Any) -> dict[str, str]:
    sample: dict[str, str] = one.request.metadata
    return sample


def test_samples_between_those_that_were_judged_get_free_numbers(tmp_path: Path) -> None:
    """A run that was interrupted, judged and completed: else each later answer is judged again."""
    rows = [
        {**row, "row_index": index, "job_id": f"j{index}"}
        for index, row in enumerate(answers(*((text, None) for text in "abcdef")))
    ]
    judge = Judge("fake")
    results = make_run(tmp_path, rows[::2])
    first = Questions(results, "r1", judge, str)
    judged = [
        {"row_index": one.number, "metadata": json.dumps(metadata(one))}
        for one in first.read(lambda number: True)
        if one is not None
    ]
    assert numbers(first) == {0: 0, 2: 1, 4: 2}
    make_run(tmp_path, judged, first.name)
    make_run(tmp_path, rows)
    assert numbers(Questions(results, "r1", judge, str)) == {0: 0, 1: 3, 2: 1, 3: 4, 4: 2, 5: 5}
    replaced = [*rows[:2], {**rows[2], "attempt": 2}, *rows[3:]]
    make_run(tmp_path, replaced)
    assert numbers(Questions(results, "r1", judge, str)) == {0: 0, 1: 1, 2: 3, 3: 4, 4: 2, 5: 5}


def test_a_template_that_is_too_slow_for_several_answers_is_refused(tmp_path: Path) -> None:
    calls: list[Any] = []

    def slow(values: Any) -> str:
        calls.append(values)
        if values["text"] != "a":
            raise BrokenTemplate("invalid_request", "the template takes too long", "template")
        return "prompt"

    results = make_run(tmp_path, answers(*((text, None) for text in "aabcdef")))
    with pytest.raises(InvalidRequest) as raised:
        Questions(results, "r1", Judge("fake"), slow).check()
    assert raised.value.message.startswith(
        "the template takes too long, for 3 of the first 5 answers: correct the template"
    )
    assert len(calls) == 5
