"""Conversations as files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobs.api.conversation import Turn
from jobs.errors import InvalidRequest, JobError
from jobs.saved import read_conversation, write_conversation

TURN = Turn([{"role": "user", "content": "a"}], {"role": "assistant", "content": "b"}, "stop")


def test_a_conversation_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write_conversation(path, "m", "Be brief.", [TURN])
    assert read_conversation(path) == ("m", "Be brief.", [TURN])
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("absent/c.json", "No such file or directory"), (".", "it is no regular file")],
)
def test_a_file_that_cannot_be_written_is_named_as_it_was_given(
    tmp_path: Path, name: str, reason: str
) -> None:
    with pytest.raises(JobError, match=reason) as caught:
        write_conversation(tmp_path / name, "m", "", [TURN])
    assert caught.value.code == "invalid_request" and str(tmp_path / name) in caught.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"can't be written: (File name|embedded null)"):
        write_conversation(tmp_path / name, "m", "", [TURN])
    with pytest.raises(InvalidRequest, match="there is no such file"):
        read_conversation(tmp_path / name)


def test_a_pipe_is_neither_replaced_nor_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    with pytest.raises(JobError, match="no regular file"):
        write_conversation(tmp_path / "f", "m", "", [TURN])
    with pytest.raises(JobError, match="no such file"):
        read_conversation(tmp_path / "f")
    assert (tmp_path / "f").is_fifo()


def test_only_its_owner_may_read_a_conversation(tmp_path: Path) -> None:
    write_conversation(tmp_path / "c", "m", "", [TURN])
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o600


def test_a_key_that_an_object_has_twice_is_refused(tmp_path: Path) -> None:
    write_conversation(tmp_path / "c", "m", "", [TURN])
    text = (tmp_path / "c").read_text().replace('"role":"user"', '"role":"user","role":"user"')
    (tmp_path / "c").write_text(text)
    with pytest.raises(JobError, match=r"turns\[0\]\.\w+\[0\]\.role: given twice in one object"):
        read_conversation(tmp_path / "c")


def test_a_system_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    write_conversation(tmp_path / "c", "m", "Be brief.", [TURN])
    text = (tmp_path / "c").read_text().replace("Be brief.", "\\ud800")
    (tmp_path / "c").write_text(text)
    with pytest.raises(JobError, match="lone surrogate"):
        read_conversation(tmp_path / "c")
