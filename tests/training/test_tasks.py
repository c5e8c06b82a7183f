"""The tasks of the demo model: answers are correct, held-out subjects never occur in training."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from typing import Any

import pytest

from training import tasks
from training.chat import CHAT_TEMPLATE, render_prompt, render_reply
from training.columns import add_reasoning, subtract_reasoning
from training.words import CAPITALS, WORDS
from worker.demo import DATASET, MODEL_DIR

EXAMPLES = 10_000
WORD_TASKS = {"reverse", "sort", "order", "count", "length"}
NUMBER_TASKS = {"addition", "addition_2digit", "subtraction", "compare"}


@pytest.fixture(scope="module")
def training_examples() -> list[tasks.Example]:
    """The first training examples with a seed other than that of the shipped model."""
    return list(islice(tasks.training_examples(random.Random(5)), EXAMPLES))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """The rows of the shipped data set."""
    return [json.loads(line) for line in DATASET.read_text(encoding="utf-8").splitlines()]


def numbers(prompt: str) -> list[int]:
    """The numbers in a prompt, in order."""
    return [int(n) for n in re.findall(r"\d+", prompt)]


def expected(task: str, prompt: str) -> str | None:
    """The answer computed from the prompt only; None if the prompt is not recognised."""
    found = numbers(prompt)
    words: list[str] = re.findall(r"[a-z]+", prompt)
    known = [w for w in words if w in WORDS]
    if task in ("addition", "addition_2digit"):
        return str(sum(found))
    if task == "subtraction":
        b_comes_first = prompt.startswith(("Take", "Subtract", "Can you"))
        a, b = reversed(found) if b_comes_first else found
        return str(a - b)
    if task == "compare":
        large = re.search("larger|bigger|greater|maximum", prompt)
        return str(max(found) if large else min(found))
    if task == "reverse":
        return "".join(reversed(known[-1]))
    if task == "sort":
        return "".join(sorted(known[-1]))
    if task == "order":
        return ", ".join(sorted(known[-3:]))
    if task == "length":
        return str(len(known[-1]))
    if task == "count":
        letters = [w for w in words if len(w) == 1]
        return str(known[-1].count(letters[0]))
    if task == "capital":
        return next((CAPITALS[c] for c in sorted(CAPITALS) if c in prompt), None)
    return None


def test_every_row_of_the_data_set_has_the_correct_answer(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        prompt = row["messages"][-1]["content"]
        assert row["target"] == expected(row["task"], prompt), prompt


def test_training_answers_are_correct(training_examples: list[tasks.Example]) -> None:
    """Checks the last turn of number tasks; words may be made up."""
    checked = 0
    for example in training_examples:
        prompt = example.messages[-1]["content"]
        if example.task in NUMBER_TASKS:
            bare = prompt.split("answer: ")[-1].split("Question: ")[-1]
            bare = bare.removeprefix("Hi! ").removeprefix("Hello. ").strip()
            assert example.answer == expected(example.task, bare), prompt
            checked += 1
    assert checked > EXAMPLES / 3


def test_the_data_set_has_the_documented_tasks_and_sizes(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 500
    assert all(set(row) == {"messages", "target", "task"} for row in rows)
    assert len({row["messages"][-1]["content"] for row in rows}) == 500
    assert {row["task"] for row in rows} == WORD_TASKS | NUMBER_TASKS | {"capital"}
    two_digits = [row for row in rows if row["task"] == "addition_2digit"]
    assert len(two_digits) >= 80
    for row in two_digits:
        assert all(10 <= n <= 99 for n in numbers(row["messages"][-1]["content"]))
    with_system_turn = sum(row["messages"][0]["role"] == "system" for row in rows)
    assert 0.15 < with_system_turn / len(rows) < 0.35


def test_every_row_of_the_data_set_is_held_out(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        prompt = row["messages"][-1]["content"]
        if row["task"] in NUMBER_TASKS:
            a, b = numbers(prompt)
            assert tasks.pair_is_held_out(a, b), prompt
        elif row["task"] in WORD_TASKS:
            known = [w for w in re.findall(r"[a-z]+", prompt) if w in WORDS]
            subject = known[-3:] if row["task"] == "order" else known[-1:]
            assert all(word in tasks.HELD_OUT_WORDS for word in subject), prompt
            assert all(tasks.word_is_held_out(word) for word in subject), prompt
        else:
            assert tasks.prompt_is_held_out(tuple(row["messages"])), prompt


def test_the_generator_reproduces_the_data_set(rows: list[dict[str, Any]]) -> None:
    examples = tasks.held_out_examples(seed=1)
    assert [list(e.messages) for e in examples] == [row["messages"] for row in rows]
    assert [e.answer for e in examples] == [row["target"] for row in rows]


def test_no_training_example_has_a_held_out_pair(
    training_examples: list[tasks.Example],
) -> None:
    seen = 0
    for example in training_examples:
        for message in example.messages:
            found = numbers(message["content"])
            if message["role"] == "user" and len(found) == 2 and "ount " not in message["content"]:
                seen += 1
                assert not tasks.pair_is_held_out(*found), message
    assert seen > EXAMPLES / 3


def test_no_training_example_has_a_held_out_word(
    training_examples: list[tasks.Example],
) -> None:
    held_out = set(tasks.HELD_OUT_WORDS)
    assert len(held_out) > 50
    for example in training_examples:
        for text in [message["content"] for message in example.messages]:
            assert not held_out & set(re.findall(r"[a-z]+", text.lower())), text


def test_no_training_example_is_a_held_out_capital_prompt(
    training_examples: list[tasks.Example],
) -> None:
    capitals = [e for e in training_examples if e.task == "capital"]
    assert capitals
    assert not any(tasks.prompt_is_held_out(e.messages) for e in capitals)


@pytest.mark.parametrize(("a", "b"), [(17, 25), (999, 999), (0, 0), (5, 128), (100, 99)])
def test_column_reasoning_ends_with_the_answer(a: int, b: int) -> None:
    assert int(add_reasoning(a, b).splitlines()[-1]) == a + b
    assert int(subtract_reasoning(a, b).splitlines()[-1]) == a - b
    assert int(subtract_reasoning(b, a).splitlines()[-1]) == b - a


def test_column_reasoning_goes_digit_by_digit() -> None:
    assert add_reasoning(17, 25) == "17+25\n7+5+0=2 carry 1\n1+2+1=4 carry 0\n042"
    assert subtract_reasoning(25, 117).splitlines() == [
        "025-117",
        "0<1",
        "117-025",
        "7-5-0=2 borrow 0",
        "1-2-0=9 borrow 1",
        "1-0-1=0 borrow 0",
        "-092",
    ]


def test_the_split_is_the_same_in_every_process() -> None:
    assert [n for n in range(40) if tasks.is_held_out(f"pair:{n}:{n}")] == [5, 6, 29, 31, 32, 34]


def test_the_shipped_template_renders_the_training_prompts(
    training_examples: list[tasks.Example],
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    for example in training_examples[:300]:
        messages = list(example.messages)
        for thinking in (True, False):
            assert render_prompt(messages, thinking) == tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
            )
        reply = {"role": "assistant", "content": example.answer}
        if example.reasoning:
            reply["reasoning_content"] = example.reasoning
        whole = render_prompt(messages) + render_reply(example.reasoning, example.answer) + "\n"
        assert whole == tokenizer.apply_chat_template([*messages, reply], tokenize=False)
