"""Conversations as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.api.conversation import Turn
from jobs.saved import read_conversation, write_conversation

TURN = Turn([{"role": "user", "content": "a"}], {"role": "assistant", "content": "b"}, "stop")


def test_a_conversation_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write_conversation(path, "m", "Be brief.", [TURN])
    assert read_conversation(path) == ("m", "Be brief.", [TURN])
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("absent/c.json", "No such file or directory"), (".", "Is a directory")],
)
def test_a_file_that_cannot_be_written_is_named_as_it_was_given(
    tmp_path: Path, name: str, reason: str
) -> None:
    with pytest.raises(OSError) as caught:
        write_conversation(tmp_path / name, "m", "", [TURN])
    assert (caught.value.filename, caught.value.strerror) == (str(tmp_path / name), reason)
    assert caught.value.filename2 is None
    assert list(tmp_path.iterdir()) == []
