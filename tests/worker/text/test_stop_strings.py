"""Incremental stop strings, compared with a naive search in the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.text.stop_strings import StopStrings

LETTERS = "ab\n"  # few letters, so that partial and overlapping matches are frequent
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)
PIECES = st.lists(st.text(LETTERS, max_size=4), max_size=10)


def naive(text: str, stops: list[str], *, include: bool = False) -> tuple[str, bool]:
    """The first character that completes a stop string ends the text."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if include else end - max(map(len, ending))], True
    return text, False


def watch(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], bool]:
    """The text returned for each piece, and whether a stop string ended it."""
    watcher, shown = StopStrings(stops, include=include), []
    for piece in pieces:
        text, stopped = watcher.push(piece)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, watcher.flush()], False


@given(pieces=PIECES, stops=STOPS, include=st.booleans())
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    shown, stopped = watch(pieces, stops, include=include)
    assert ("".join(shown), stopped) == naive("".join(pieces), stops, include=include)


@given(pieces=PIECES, stops=STOPS)
def test_no_part_of_a_stop_string_is_returned(pieces: list[str], stops: list[str]) -> None:
    """The text returned so far is always a prefix of the final text."""
    watcher, shown = StopStrings(stops), ""
    whole, _ = naive("".join(pieces), stops)
    for piece in pieces:
        text, stopped = watcher.push(piece)
        shown += text
        assert whole.startswith(shown)
        if stopped:
            break


@given(pieces=PIECES, stops=STOPS)
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(
    pieces: list[str], stops: list[str]
) -> None:
    watcher, shown, read = StopStrings(stops), "", ""
    for piece in pieces:
        text, stopped = watcher.push(piece)
        shown, read = shown + text, read + piece
        if stopped:
            return
        held = read.removeprefix(shown)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_first_complete_stop_string_wins() -> None:
    """The result is the same for "abc", "d" as for "abcd"."""
    assert watch(["abc", "d"], ["abcd", "bc"]) == (["a"], True)
    assert watch(["abcd"], ["abcd", "bc"]) == (["a"], True)


def test_of_two_that_end_together_the_longer_one_is_removed() -> None:
    assert watch(["xEND"], ["D", "END"]) == (["x"], True)


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert watch(["a", "b"], []) == (["a", "b", ""], False)


def test_an_incomplete_stop_string_is_returned_at_the_end() -> None:
    assert watch(["x</s", "to"], ["</stop>"]) == (["x", "", "</sto"], False)
