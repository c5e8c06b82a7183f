"""State of sessions in files: evicted or left by an engine that ended, and read back."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.engine.stateful import QUESTION, ask, cached, files, make
from tests.worker.site import wait_until
from worker.cache.pool import CachePool
from worker.cache.state_dir import StateDir
from worker.cache.state_file import StateFile


def test_a_restarted_engine_continues_a_session(folder: Path, tmp_path: Path) -> None:
    first = make(folder, tmp_path)
    answer = ask(first, QUESTION).text
    assert files(tmp_path) == []
    first.close()
    assert len(files(tmp_path)) == 1
    second, plain = make(folder, tmp_path), make(folder, None)
    turn = ask(second, QUESTION, answer, "and then?")
    assert turn.usage is not None and cached(turn) > 64
    assert turn.text == ask(plain, QUESTION, answer, "and then?").text
    second.close()
    assert len(files(tmp_path)) == 1  # that of the same session is replaced
    assert len(StateFile.open(files(tmp_path)[0]).token_ids) > turn.usage.prompt_tokens - 16


def test_evicted_state_comes_back(folder: Path, tmp_path: Path) -> None:
    plain = make(folder, None)
    limit = plain._core.book.bytes_for_one(500) * 2
    engine = make(folder, tmp_path, cache_bytes=limit)
    sessions = engine._core.prefix.sessions
    assert sessions is not None
    ask(engine, QUESTION)
    number = 0
    while not (sessions._bytes or files(tmp_path)):  # it waits to be written, or is there
        ask(engine, f"{number} other text " * 12, session=None)
        number += 1
        assert number < 50
    wait_until(lambda: sessions._bytes == 0)
    assert len(files(tmp_path)) == 1  # jobs without a session leave none
    turn = ask(engine, QUESTION, "rain", "and then?")
    assert cached(turn) > 64
    assert turn.text == ask(plain, QUESTION, "rain", "and then?").text
    assert engine._core.book.bytes_held <= limit
    engine.close()


def test_state_of_a_salt_is_for_that_salt_only(folder: Path, tmp_path: Path) -> None:
    first = make(folder, tmp_path)
    ask(first, QUESTION, cache_salt="a")
    first.close()
    second = make(folder, tmp_path)
    assert cached(ask(second, QUESTION, cache_salt="b", session="t")) == 0
    assert cached(ask(second, QUESTION, session="u")) == 0
    assert cached(ask(second, QUESTION, cache_salt="a")) > 64
    second.close()
    assert len(files(tmp_path)) == 3
    assert b'"a"' not in files(tmp_path)[0].read_bytes()


def test_at_max_batch_1_files_change_no_bit(folder: Path, tmp_path: Path) -> None:
    exact: dict[str, Any] = {"dtype": "bf16", "max_batch": 1}
    scores: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    first = make(folder, tmp_path, **exact)
    ask(first, QUESTION)
    first.close()
    second, plain = make(folder, tmp_path, **exact), make(folder, None, **exact, prefix_cache=False)
    turn, expected = (ask(one, QUESTION, "rain", "and?", **scores) for one in (second, plain))
    assert cached(turn) >= 64 and cached(turn) % 64 == 0
    assert turn.choices[0].logprobs == expected.choices[0].logprobs
    second.close()


def test_at_max_batch_1_files_of_larger_batches_are_not_used(folder: Path, tmp_path: Path) -> None:
    """Their state was computed in other pieces, and so may have other bits."""
    first = make(folder, tmp_path)
    ask(first, QUESTION)
    first.close()
    again, exact = make(folder, tmp_path), make(folder, tmp_path, max_batch=1)
    turns = [ask(one, QUESTION, "rain", "and?", session=None) for one in (again, exact)]
    assert cached(turns[0]) > 64
    assert cached(turns[1]) == 0
    assert len(files(tmp_path)) == 1


def test_steps_do_not_wait_for_the_disk(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, written = threading.Event(), []

    def write(self: StateDir, name: str, *_: Any) -> None:
        slow.wait()
        written.append(name)

    monkeypatch.setattr(StateDir, "write", write)
    limit = make(path, None)._core.book.bytes_for_one(500) * 2
    engine = make(path, tmp_path, cache_bytes=limit)
    sessions = engine._core.prefix.sessions
    assert sessions is not None
    most = 0
    for number in range(30):
        ask(engine, f"{number} {QUESTION}", session=str(number))
        most = max(most, sessions._bytes)
    assert 0 < most <= sessions._limit  # what was evicted beyond it is given up
    slow.set()
    wait_until(lambda: sessions._bytes == 0)
    assert 0 < len(written) < 25
    engine.close()


def test_states_that_are_left_are_copied_one_after_the_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has memory for the waiting bytes of states, and not for copies of all of them."""
    limit = make(folder, None)._core.book.bytes_for_one(500) * 3
    engine = make(folder, tmp_path, cache_bytes=limit)
    sessions = engine._core.prefix.sessions
    assert sessions is not None
    for number in range(6):
        ask(engine, f"{number} {QUESTION}", session=str(number))
    wait_until(lambda: sessions._bytes == 0)
    evicted = len(files(tmp_path))
    write, copies, peaks = StateDir.write, list[weakref.ref[Any]](), []

    def watched(self: StateDir, name: str, origin: Any, state: Any, used_at: float) -> None:
        copies.append(weakref.ref(state))
        assert sum(one() is not None for one in copies) == 1
        peaks.append((sessions._bytes, state.nbytes))
        write(self, name, origin, state, used_at)

    monkeypatch.setattr(StateDir, "write", watched)
    engine.close()
    assert len(peaks) > 1 and len(files(tmp_path)) == evicted + len(peaks)
    assert all(held == nbytes <= sessions._limit for held, nbytes in peaks)
    assert sum(nbytes for _, nbytes in peaks) > sessions._limit
    assert sessions._bytes == 0


@pytest.mark.parametrize("moment", ["reserve", "evict", "close"])
def test_state_that_the_device_has_no_memory_to_copy_is_given_up(
    moment: str,
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No request fails, and whoever needs the memory gets it."""
    limit = make(path, None)._core.book.bytes_for_one(500) * 2
    engine = make(path, tmp_path, cache_bytes=limit)
    expected = ask(engine, QUESTION).text
    asked = []

    def copies_of_pages(*_: Any) -> Any:
        asked.append(None)
        raise torch.OutOfMemoryError("no room\nand more about it")

    monkeypatch.setattr(CachePool, "copies_of_pages", copies_of_pages)
    if moment == "reserve":
        for number in range(20):
            ask(engine, f"{number} other text " * 12, session=None)
    elif moment == "evict":
        assert engine._core.evict(limit) > 0
        assert len(engine._core.book.kept) == 0
    if moment != "close":
        assert ask(engine, QUESTION, session=None).text == expected
    engine.close()
    assert len(asked) == 1 and files(tmp_path) == []
    assert caplog.text.count("there is no memory to copy it") == 1


def test_an_error_other_than_a_lack_of_memory_is_raised(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(path, tmp_path)
    ask(engine, QUESTION)

    def copies_of_pages(*_: Any) -> Any:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a defect"):
        patch.setattr(CachePool, "copies_of_pages", copies_of_pages)
        engine._core.evict(1 << 30)
    engine.close()


def test_sessions_with_the_same_text_are_remembered_as_one(path: Path, tmp_path: Path) -> None:
    engine = make(path, tmp_path)
    sessions = engine._core.prefix.sessions
    assert sessions is not None
    for number in range(5):
        ask(engine, QUESTION, session=str(number))
    assert len(sessions._last) == len(sessions._ended) == 1
    engine.close()
    assert len(files(tmp_path)) == 1


def test_an_error_while_a_file_is_written_stops_no_later_one(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, failed = StateDir.write, []

    def fail_once(self: StateDir, *args: Any) -> None:
        if not failed:
            failed.append(args)
            raise ValueError("a defect")
        write(self, *args)

    monkeypatch.setattr(StateDir, "write", fail_once)
    engine = make(path, tmp_path)
    for session in "ab":
        ask(engine, f"{session} {QUESTION}", session=session)
    engine.close()
    assert len(files(tmp_path)) == 1 and "a defect" in caplog.text


def test_an_engine_whose_state_was_lost_closes(folder: Path, tmp_path: Path) -> None:
    """After a step that failed there is nothing to write."""
    engine = make(folder, tmp_path)
    ask(engine, QUESTION)
    engine._core._scheduler.reset()
    engine.close()
    assert files(tmp_path) == []


def test_an_engine_that_fails_to_stop_writes_nothing_more_and_closes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage may not be as the book says then."""
    engine = make(folder, tmp_path)
    ask(engine, QUESTION)

    def fail() -> None:
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(engine._core, "_apply", fail)
    with pytest.raises(RuntimeError, match="the device has failed"):
        engine._core.stop()
    engine.close()
    assert files(tmp_path) == []


def test_state_that_an_interrupt_left_unknown_is_not_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages have new numbers, and the device has not moved them."""
    engine = make(folder, tmp_path)
    ask(engine, QUESTION)

    def interrupted(pool: CachePool, change: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CachePool, "execute", interrupted)
        engine._core.give_back(1)
    engine.close()
    assert files(tmp_path) == []
