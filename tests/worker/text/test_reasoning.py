"""The incremental reasoning splitter, compared with a naive split of the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.worker.sources import read_tokenizer
from tests.worker.templates import QWEN_TEMPLATE
from tests.worker.tokenizers import Style, save_tokenizer
from worker.text.reasoning import ReasoningSplitter, ReasoningTags, reasoning_tags

TAGS = ReasoningTags("<think>", "</think>")
# Complete tags, parts of tags, and other text.
PART = st.sampled_from(
    ["<think>", "</think>", "<", "</", "think>", "<thi", "nk>", "\n", "\n\n", " ", "so", "42", "x"]
)
PIECES = st.lists(st.lists(PART, max_size=3).map("".join), max_size=8)


def naive(text: str, inside: bool) -> tuple[str, str]:
    """(content, reasoning) of a whole completion."""
    if not inside:
        start = text.lstrip()
        if not start.startswith(TAGS.opening):
            return text, ""
        text = start.removeprefix(TAGS.opening)
    reasoning, _, content = text.partition(TAGS.closing)
    return content.lstrip("\n"), reasoning.strip("\n")


def split(pieces: list[str], inside: bool) -> list[tuple[str, str]]:
    splitter = ReasoningSplitter(TAGS, inside=inside)
    return [*(splitter.push(piece) for piece in pieces), splitter.flush()]


@given(pieces=PIECES, inside=st.booleans())
@example(pieces=["<think>\n", "\n", "so\n", "\n</thi", "nk>", "\n", "\n42\n"], inside=False)
@example(pieces=["so </thi", "s </think", ">42"], inside=True)
def test_the_result_does_not_depend_on_how_the_text_is_cut(pieces: list[str], inside: bool) -> None:
    parts = split(pieces, inside)
    content = "".join(content for content, _ in parts)
    reasoning = "".join(reasoning for _, reasoning in parts)
    assert (content, reasoning) == naive("".join(pieces), inside)


@given(text=st.lists(PART, max_size=12).map("".join), inside=st.booleans())
def test_returned_text_is_never_revised(text: str, inside: bool) -> None:
    content, reasoning = naive(text, inside)
    splitter, shown, thought = ReasoningSplitter(TAGS, inside=inside), "", ""
    for character in text:
        more_content, more_reasoning = splitter.push(character)
        shown, thought = shown + more_content, thought + more_reasoning
        assert content.startswith(shown)
        assert reasoning.startswith(thought)


@pytest.mark.parametrize(
    ("text", "inside", "content", "reasoning"),
    [
        ("<think>\nso\n</think>\n\n42", False, "42", "so"),
        ("\n<think>\n\n</think>\n\n42", False, "42", ""),
        ("so\n</think>\n\n42\n", True, "42\n", "so"),
        ("so it goes", True, "", "so it goes"),
        ("42 <think>no</think>", False, "42 <think>no</think>", ""),
        ("<think>a</think>b<think>c</think>", False, "b<think>c</think>", "a"),
        ("  42", False, "  42", ""),
        ("<thin ice", False, "<thin ice", ""),
        ("<thin", False, "<thin", ""),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_only_a_block_at_the_start_is_reasoning(
    text: str, inside: bool, content: str, reasoning: str
) -> None:
    parts = split(list(text), inside)
    assert "".join(part for part, _ in parts) == content
    assert "".join(part for _, part in parts) == reasoning


def test_text_is_returned_as_soon_as_possible() -> None:
    splitter = ReasoningSplitter(TAGS, inside=False)
    shown = []
    for piece in ("<think>", "\nso", " it\n", "goes</th", "ink>\n\n", "42\n"):
        content, reasoning = splitter.push(piece)
        shown.append((content, reasoning, splitter.inside))
    assert shown == [
        ("", "", True),
        ("", "so", True),
        ("", " it", True),
        ("", "\ngoes", True),
        ("", "", False),
        ("42\n", "", False),
    ]


@pytest.mark.parametrize(
    ("style", "template", "tags"),
    [
        ("qwen", "no tags here", TAGS),
        ("llama3", QWEN_TEMPLATE, TAGS),
        ("llama3", "no tags here", None),
        ("gemma", "<think> alone", None),
    ],
)
def test_a_model_reasons_if_its_vocabulary_or_its_template_has_both_tags(
    tmp_path: Path, style: Style, template: str, tags: ReasoningTags | None
) -> None:
    save_tokenizer(tmp_path, style)
    assert reasoning_tags(read_tokenizer(tmp_path), template) == tags
