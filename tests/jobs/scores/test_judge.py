"""The metric judge: which grade is read in an answer, and what a template gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.errors import InvalidRequest
from jobs.scores.judge import DEFAULT_TEMPLATE, Judge, template_values, verdict_of
from jobs.scores.spec import parse_spec

GRADES = {
    1.0: [
        "It agrees.\n\nGRADE: C",
        "**Grade: C**",
        "grade: **correct**.",
        "GRADE: I\nOn second thought:\nGRADE: C",
        "GRADE: C (it agrees)",
        "My grade is C because it agrees.",
        "C",
        "It is right.\nYes.",
        r"\boxed{C}",
        "Score: 1.0",
    ],
    0.5: ["GRADE: P", "Grade: partially correct", "rating = 5 out of 10", "Score: **50 %**"],
    0.0: ["GRADE: I", "GRADE: INCORRECT", "verdict: wrong", "0/10", "The score is 0."],
    8.0: ["Rating: [[8]]", "I say [[8]] for it.", "SCORE: 8"],
    -1.0: ["Score: -1"],
}
NO_GRADES = [
    "",
    "I think it is fine",
    "GRADE: B",
    "GRADE: C for correct, GRADE: P for partly correct or GRADE: I",  # the scale, without a verdict
    "grade 4 students know this",
    "10/10 would read again",
    "Score: 3/0",
    "Score: " + "9" * 400,
    "it is 8 of all",
    DEFAULT_TEMPLATE.rpartition("\n\n")[2],  # repeats what it was told
]


@pytest.mark.parametrize("value", GRADES)
def test_a_grade_is_read_in_many_forms(value: float) -> None:
    for text in GRADES[value]:
        assert verdict_of(text).value == value, text
    assert verdict_of(GRADES[value][0]).explanation == GRADES[value][0]


@pytest.mark.parametrize("text", NO_GRADES)
def test_an_answer_without_a_clear_grade_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="the judge gave no grade; its answer ends with"):
        verdict_of(text)


def test_a_judge_is_a_model_and_perhaps_a_template(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ text }}")
    plain = Judge.of("org/name-GGUF:Q4_K_M", {})
    assert (plain.model, plain.template) == ("org/name-GGUF:Q4_K_M", DEFAULT_TEMPLATE)
    assert plain.fields == {"temperature": 0}
    mine = Judge.of(f"m:{file}", {"temperature": 1})
    assert (mine.model, mine.template, mine.fields) == ("m", "{{ text }}", {"temperature": 1})
    with pytest.raises(InvalidRequest, match=r"the template no\.jinja can't be read: No such file"):
        Judge.of("m:no.jinja", {})
    with pytest.raises(InvalidRequest, match="judge needs the model that grades: judge:MODEL"):
        parse_spec("judge")
    names = {
        one.run_of("r") for one in (plain, mine, Judge.of("m", {}), Judge.of("m", {"seed": 1}))
    }
    assert len(names) == 4
    assert all(len(Judge.of("m", {}).run_of(run)) <= 100 for run in ("r", "r" * 100))


def test_the_question_is_what_the_user_asked_last() -> None:
    messages = [
        {"role": role, "content": text}
        for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"), ("tool", "d"))
    ]
    values = template_values({"messages": messages, "text": "t", "metadata": '{"k": "v"}'})
    assert (values["question"], values["text"], values["target"]) == ("c", "t", None)
    assert values["metadata"] == {"k": "v"}
    assert template_values({"prompt": "p"})["question"] == "p"
