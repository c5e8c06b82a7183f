"""The folder of state files: its limit, damaged files, and what is none of them."""

from __future__ import annotations

import errno
import io
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.answer import ChatCompletion
from jobs.errors import JobError
from tests.worker.engine.stateful import QUESTION, ask, cached, files, make
from worker import Engine
from worker.cache import state_file
from worker.cache.state_dir import StateDir
from worker.cache.state_file import StateFile
from worker.checkpoint import safetensors_files


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


def test_a_damaged_file_of_a_session_is_no_prompt_cache(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"{'a' * 64}.state.safetensors").write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        make(path, tmp_path).close()
    assert "it has only 1 byte" in caplog.text and "prompt cache" not in caplog.text


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


def test_a_folder_that_cannot_be_used_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=r"the state folder .* can't be written"):
        make(path, tmp_path / "file")


def test_files_that_never_became_complete_are_deleted(path: Path, tmp_path: Path) -> None:
    old, new = (tmp_path / f".{name}.1.partial" for name in ("old", "new"))
    for one in (old, new):
        one.touch()
    os.utime(old, (0, 0))
    make(path, tmp_path).close()
    assert [*tmp_path.iterdir()] == [new]


def test_containers_with_one_pid_start_in_a_folder_at_once(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    others: list[Engine] = []

    unlink = Path.unlink

    def unlinked(name: Path) -> None:
        monkeypatch.setattr(Path, "unlink", unlink)
        others.append(make(path, tmp_path))
        name.unlink()

    monkeypatch.setattr(Path, "unlink", unlinked)
    first = make(path, tmp_path)
    for engine in (first, *others):
        engine.close()
    assert len(others) == 1 and [*tmp_path.iterdir()] == []


def test_containers_with_one_pid_write_the_state_of_a_session_at_once(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is that of the one that ends last, and whole."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    first, second = make(path, tmp_path), make(path, tmp_path)
    answer = ask(first, QUESTION).text
    ask(second, QUESTION, answer, "and then?")
    fsync = os.fsync

    def written(file: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        second.close()
        fsync(file)

    monkeypatch.setattr(os, "fsync", written)
    first.close()
    (file,) = tmp_path.iterdir()
    assert caplog.text == ""
    third = make(path, tmp_path)
    assert cached(ask(third, QUESTION, answer, "and then?", session=None)) > 64
    assert [*tmp_path.iterdir()] == [file]
    third.close()


class Disk(io.BytesIO):
    """A file on a disk with errors."""

    def read(self, _size: int | None = -1, /) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def too_many(name: Path) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(name))


@pytest.mark.parametrize(
    ("opened", "reason"),
    [(too_many, "Too many open files"), (lambda _: Disk(), "Input/output error")],
)
def test_a_file_that_cannot_be_opened_now_is_kept_and_found_later(
    opened: Callable[[Path], Any],
    reason: str,
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = make(path, tmp_path)
    answer = ask(first, QUESTION).text
    first.close()
    (file,) = files(tmp_path)

    def open_file(name: Path, *args: Any) -> Any:
        return opened(name) if Path(name) == file else open(name, *args)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(safetensors_files, "open", open_file, raising=False)
        second = make(path, tmp_path)
    assert files(tmp_path) == [file]
    assert reason in caplog.text and "deleted" not in caplog.text
    second.close()
    third = make(path, tmp_path)
    assert cached(ask(third, QUESTION, answer, "and then?")) > 64
    third.close()


def test_a_file_that_cannot_be_read_now_is_kept(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(path, tmp_path)
    answer = ask(first, QUESTION).text
    first.close()
    kept = files(tmp_path)
    second = make(path, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(state_file, "checksum", no_disk)
        assert cached(ask(second, QUESTION, answer, "and then?", session=None)) == 0
    assert files(tmp_path) == kept
    second.close()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError()])
def test_without_memory_for_a_file_its_prompt_is_computed_again(
    error: Exception,
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The file stays, and is used as soon as there is memory."""
    first = make(path, tmp_path)
    answer = ask(first, QUESTION).text
    first.close()
    second = make(path, tmp_path)

    def no_memory(*_: Any) -> Any:
        raise error

    def turn() -> ChatCompletion:
        return ask(second, QUESTION, answer, "and then?", session=None)

    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "_copies", no_memory)
        text = turn().text
    assert caplog.text.count("there is no memory for it") == 1
    second._core.evict(1 << 30)
    again = turn()
    assert cached(again) > 64 and again.text == text
    second.close()


def no_disk(*_: Any) -> str:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
