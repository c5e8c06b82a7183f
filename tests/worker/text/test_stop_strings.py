"""Stop strings against the naive search in the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.text.stop_strings import StopStrings

LETTERS = "ab\n"  # few, so that stop strings begin, fail and overlap all the time
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)
PIECES = st.lists(st.text(LETTERS, max_size=4), max_size=10)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read character by character; the first one that completes a stop string ends the text."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def watch(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    """What is shown, piece by piece, and whether a stop string ended it."""
    watcher, shown = StopStrings(stops), []
    for piece in pieces:
        text, stopped = watcher.push(piece)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, watcher.flush()], False


@given(pieces=PIECES, stops=STOPS)
def test_any_cut_of_a_text_gives_what_the_whole_text_gives(
    pieces: list[str], stops: list[str]
) -> None:
    shown, stopped = watch(pieces, stops)
    assert ("".join(shown), stopped) == naive("".join(pieces), stops)


@given(pieces=PIECES, stops=STOPS)
def test_nothing_that_is_shown_is_part_of_the_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    """At every moment what was shown is a beginning of what is shown in the end."""
    watcher, shown = StopStrings(stops), ""
    whole, _ = naive("".join(pieces), stops)
    for piece in pieces:
        text, stopped = watcher.push(piece)
        shown += text
        assert whole.startswith(shown)
        if stopped:
            break


@given(pieces=PIECES, stops=STOPS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(
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


def test_the_first_complete_one_counts_not_the_first_begun() -> None:
    """So it is the same whether "abc" and "d" or "abcd" comes."""
    assert watch(["abc", "d"], ["abcd", "bc"]) == (["a"], True)
    assert watch(["abcd"], ["abcd", "bc"]) == (["a"], True)


def test_of_two_that_end_together_the_longer_is_hidden() -> None:
    assert watch(["xEND"], ["D", "END"]) == (["x"], True)


def test_without_stop_strings_nothing_is_held() -> None:
    assert watch(["a", "b"], []) == (["a", "b", ""], False)


def test_a_stop_string_that_stays_incomplete_is_shown_at_the_end() -> None:
    assert watch(["x</s", "to"], ["</stop>"]) == (["x", "", "</sto"], False)
