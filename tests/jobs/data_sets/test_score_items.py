"""Rows of a data set → items that are scored."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from jobs.api.score_request import ITEM_TYPES
from jobs.data_sets.id_index import IdIndex
from jobs.data_sets.modes import SCORE_MODES
from jobs.data_sets.requests import InvalidLine, Overrides
from jobs.data_sets.score_items import COLUMNS, ItemLine, ItemReader


def read(mode: str, row: Any, part: str = "field", **overrides: Any) -> ItemLine | InvalidLine:
    given = Overrides("m", "r", mode=mode, **overrides)
    with closing(IdIndex()) as ids:
        return ItemReader(given, ids, part).read(3, "line 4", 4, row)


def item(mode: str, row: Any, **overrides: Any) -> Any:
    line = read(mode, row, **overrides)
    assert isinstance(line, ItemLine), line.sentence
    assert line.request.job.run == "r" and line.request.job.priority == "bulk"
    return line.request.items[0]


def error(mode: str, row: Any, **overrides: Any) -> str:
    line = read(mode, row, **overrides)
    assert isinstance(line, InvalidLine)
    return line.sentence


def test_each_type_of_items_has_a_mode() -> None:
    assert SCORE_MODES == tuple(ITEM_TYPES) == tuple(COLUMNS)


@pytest.mark.parametrize(
    ("row", "continuations"),
    [
        ({"prompt": "a b", "continuation": "c"}, [" c"]),
        ({"prompt": "a b", "target": 7}, [" 7"]),
        ({"prompt": "a b", "target": 7.0}, [" 7"]),
        ({"prompt": "a b\n", "continuations": ["c", " d"]}, ["c", " d"]),
        ({"prompt": "a b", "continuations": '["c", " d"]'}, [" c", " d"]),  # as a cell of CSV
        ({"prompt": "a b", "continuation": "[1]"}, [" [1]"]),
        ({"prompt": "", "continuation": "c"}, ["c"]),
        ({"messages": [{"role": "user", "content": "a"}], "continuation": "c"}, ["c"]),
        ({"prompt": [1, 2], "continuations": [[3], "c"]}, [[3], "c"]),
    ],
)
def test_continuations_follow_their_prompt(row: Any, continuations: Any) -> None:
    found = item("loglikelihood", row)
    assert (found["continuations"], found["row"]) == (continuations, 3)


def test_a_delimiter_replaces_the_space() -> None:
    row = {"prompt": "a b", "continuations": ["c", " d"]}
    assert item("loglikelihood", row, delimiter="")["continuations"] == ["c", " d"]
    assert item("loglikelihood", row, delimiter="\n")["continuations"] == ["\nc", "\n d"]


@pytest.mark.parametrize(
    ("choices", "target", "right"),
    [
        (["x", "y"], 1, "y"),
        (["x", "y"], "y ", "y"),
        (["x", "y"], "1", "y"),
        (["x", "y"], "B", "y"),
        (["1", "2", "0"], 2, "0"),  # a number is an index
        (["x", "y"], 1.0, "y"),  # as pandas writes it beside nulls
        (["1", "2", "0"], "2", "2"),  # and a text first a choice
        (["B", "A"], "A", "A"),
        (["x", "y"], "(B)", "y"),
        ({"text": ["x", "y"], "label": ["1", "2"]}, "2", "y"),
        ({"text": ["x", "y"], "label": ["1", "2"]}, 2, "y"),
        ('["x", "y"]', "y", "y"),
        ([3, 4], 1, "4"),
        ([[3], [4]], "B", "1"),
        (["x", "y"], None, None),
    ],
)
def test_the_target_of_a_choice_is_its_text_index_letter_or_name(
    choices: Any, target: Any, right: str | None
) -> None:
    row = {"prompt": "p", "choices": choices, "target": target}
    assert item("choice", row).get("target") == right


def test_options_and_kept_columns_go_to_the_item() -> None:
    line = read(
        "perplexity",
        {"text": "a b", "id": 7, "custom_id": 5, "other": 1},
        fields={"window": 8, "token_logprobs": False},
        keep=("id",),
    )
    assert isinstance(line, ItemLine)
    assert line.request.token_logprobs is False
    assert line.request.items == [
        {
            **{"type": "perplexity", "text": "a b", "window": 8, "prefix": True},
            **{"custom_id": "5", "row": 3, "metadata": {"id": "7"}},
        }
    ]


@pytest.mark.parametrize(
    ("mode", "row", "sentence"),
    [
        (
            "choice",
            {"prompt": "p", "label": 1},
            "needs choices; of the columns that are read, this",
        ),
        ("choice", {"prompt": "p", "choices": "x"}, "field 'choices': must be a list, got 'x'"),
        ("choice", {"prompt": "p", "choices": []}, "field 'choices'"),
        ("choice", {"prompt": "p", "choices": ["x", ""]}, "field 'choices': number 1 is empty"),
        (
            "choice",
            {"prompt": "p", "choices": ["x", "y"], "target": "z"},
            "field 'target': 'z' is none of the 2 choices",
        ),
        ("loglikelihood", {"continuation": "x"}, "needs prompt or messages"),
        ("loglikelihood", {"prompt": "p"}, "needs continuations or continuation or target"),
        (
            "loglikelihood",
            {"body": {}, "custom_id": "a"},
            "a line of an OpenAI batch file is a chat",
        ),
        ("perplexity", {"prompt": "p"}, "needs text"),
        ("perplexity", {"text": 5}, "field 'text'"),
    ],
)
def test_a_bad_row_is_named_by_its_column(mode: str, row: Any, sentence: str) -> None:
    assert sentence in error(mode, row)


def test_an_option_is_named_as_one() -> None:
    assert "-o window" in error("perplexity", {"text": "a"}, fields={"window": 0})
