"""State of sessions in files: evicted or left by an engine that ended, and read back."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.api.answer import ChatCompletion
from jobs.errors import JobError
from tests.worker.site import wait_until
from worker import Engine
from worker.engine.prompt_caches import keep_sessions
from worker.engine.state_dir import StateDir
from worker.engine.state_file import StateFile

QUESTION = "a question about the weather of the next days " * 5

Make = Callable[..., Engine]


def make(folder: Path, states: Path | None, limit: int = 1 << 30, **options: Any) -> Engine:
    """An engine with a state folder."""
    options = {"dtype": "fp32", "max_batch": 4, **options}
    engine = Engine.load(str(folder), device="cpu", **options)
    if states is not None:
        keep_sessions(engine._core, states, limit)
    return engine


def ask(engine: Engine, *texts: str, session: str | None = "s", **fields: Any) -> ChatCompletion:
    """The answer to the last text; those before it are questions and answers in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    fields = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, **fields}
    request = {"model": "m", "messages": messages, "job": {"session": session}, **fields}
    return engine.chat(request)


def cached(completion: ChatCompletion) -> int:
    usage = completion.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


def files(states: Path) -> list[Path]:
    return sorted(states.glob("*.state.safetensors"))


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
    limit = plain._core.pool.bytes_for_one(500) * 2
    engine = make(folder, tmp_path, cache_bytes=limit)
    sessions = engine._core.prefix.sessions
    assert sessions is not None
    ask(engine, QUESTION)
    number = 0
    while not files(tmp_path):
        ask(engine, f"{number} other text " * 12, session=None)
        number += 1
        assert number < 50
    assert len(files(tmp_path)) == 1  # jobs without a session leave none
    wait_until(lambda: sessions._bytes == 0)  # the file is there before it is noted
    turn = ask(engine, QUESTION, "rain", "and then?")
    assert cached(turn) > 64
    assert turn.text == ask(plain, QUESTION, "rain", "and then?").text
    assert engine._core.pool.bytes_held <= limit
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


def test_damaged_files_are_deleted_with_a_log_line(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make(path, tmp_path)
    for session in "abc":
        ask(first, f"{session} {QUESTION}", session=session)
    first.close()
    truncated, changed, newer = files(tmp_path)
    truncated.write_bytes(truncated.read_bytes()[:-1])
    data = newer.read_bytes()
    newer.write_bytes(data.replace(b'"version":"1"', b'"version":"9"'))
    data = changed.read_bytes()
    changed.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        second = make(path, tmp_path)
    assert files(tmp_path) == sorted([changed, newer])
    assert "deleted a damaged state file" in caplog.text and str(truncated) in caplog.text
    found = [cached(ask(second, f"{one} {QUESTION}", session=None)) for one in "abc"]
    assert found == [0, 0, 0]
    assert files(tmp_path) == [newer]
    second.close()


def test_a_file_that_is_replaced_while_it_is_read_is_no_damaged_one(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(path, tmp_path)
    ask(first, QUESTION)
    first.close()
    (file,) = files(tmp_path)
    second = make(path, tmp_path)
    find = StateDir.find

    def found_before(*given: Any, **more: Any) -> Any:
        found = find(*given, **more)
        if found is not None:
            file.write_bytes(file.read_bytes()[:-1])
        return found

    monkeypatch.setattr(StateDir, "find", found_before)
    assert cached(ask(second, QUESTION, session=None)) == 0
    assert files(tmp_path) == [file]
    second.close()


def test_the_least_recently_used_files_are_deleted(path: Path, tmp_path: Path) -> None:
    first = make(path, tmp_path)
    for session in "abc":
        ask(first, f"{session} {QUESTION}", session=session)
    first.close()
    size = max(file.stat().st_size for file in files(tmp_path))
    other = tmp_path / "model.safetensors"
    other.write_bytes(bytes(5 * size))
    limit = 3 * size + size // 2
    second = make(path, tmp_path, limit)
    assert cached(ask(second, f"a {QUESTION}", session="new")) > 0  # used now
    ask(second, f"d {QUESTION}", session="d")
    second.close()
    assert sum(file.stat().st_size for file in files(tmp_path)) <= limit
    third = make(path, tmp_path, limit)
    found = {one: cached(ask(third, f"{one} {QUESTION}", session=None)) > 64 for one in "bacd"}
    assert found == {"a": True, "b": False, "c": False, "d": True}
    assert other.stat().st_size == 5 * size
    third.close()


def test_steps_do_not_wait_for_the_disk(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, written = threading.Event(), []

    def write(self: StateDir, name: str, *_: Any) -> None:
        slow.wait()
        written.append(name)

    monkeypatch.setattr(StateDir, "write", write)
    limit = make(path, None)._core.pool.bytes_for_one(500) * 2
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


def test_a_folder_that_cannot_be_used_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=r"the state folder .* can't be written"):
        make(path, tmp_path / "file")


def test_what_is_no_file_is_left_alone(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [tmp_path / f"{digit * 64}.state.safetensors" for digit in "abc"]
    os.mkfifo(names[0])
    names[1].mkdir()
    names[2].symlink_to(names[2])
    with caplog.at_level(logging.WARNING):
        make(path, tmp_path).close()
    assert sorted(tmp_path.iterdir()) == names and caplog.text == ""


def test_a_file_with_absurd_numbers_is_a_damaged_one(path: Path, tmp_path: Path) -> None:
    first = make(path, tmp_path)
    ask(first, QUESTION)
    first.close()
    (file,) = files(tmp_path)
    data, ids = file.read_bytes(), StateFile.open(file).token_ids
    old = ",".join(map(str, ids[:12])).encode()
    new = str(1 << 63).encode().ljust(len(old), b" ")
    file.write_bytes(data.replace(b"[" + old, b"[" + new))
    make(path, tmp_path).close()
    assert files(tmp_path) == []


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


def test_files_that_never_became_complete_are_deleted(path: Path, tmp_path: Path) -> None:
    old, new = (tmp_path / f".{name}.1.partial" for name in ("old", "new"))
    for one in (old, new):
        one.touch()
    os.utime(old, (0, 0))
    make(path, tmp_path).close()
    assert [*tmp_path.iterdir()] == [new]


def test_the_limit_of_a_folder_holds_from_the_start(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make(path, tmp_path)
    ask(first, QUESTION)
    first.close()
    assert files(tmp_path)
    with caplog.at_level(logging.INFO):
        second = make(path, tmp_path, 10)
        assert files(tmp_path) == []
        ask(second, QUESTION)
        second.close()
    assert files(tmp_path) == []


def test_a_damaged_file_of_a_session_is_no_prompt_cache(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"{'a' * 64}.state.safetensors").write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        make(path, tmp_path).close()
    assert "it has only 1 bytes" in caplog.text and "prompt cache" not in caplog.text
