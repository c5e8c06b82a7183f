"""Pieces into entries: what goes out when, and what happens while Redis lags."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import redis

from jobs.stream.entries import Entry
from worker.backend import Delta
from worker.queue.publisher import Publisher, StreamBuffer


class Writer:
    """Takes entries as the stream writer does."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.calls = 0
        self.away = False
        self.refuses: set[str] = set()

    def write_many(self, entries: Sequence[Entry]) -> list[bool]:
        self.calls += 1
        if self.away:
            raise redis.ConnectionError("away")
        self.entries += entries
        return [entry.job not in self.refuses for entry in entries]

    def text(self, job: str) -> str:
        return "".join(
            piece.get("c", "")
            for entry in self.entries
            if entry.job == job
            for piece in entry.payload["p"]
        )


@pytest.fixture
def writer() -> Writer:
    return Writer()


@pytest.fixture
def made(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> Publisher:
    """A publisher whose clock stands still."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    return Publisher(writer)  # type: ignore[arg-type]


def say(stream: StreamBuffer, text: str, **more: Any) -> None:
    stream.add([Delta(0, content=text, **more)])


def test_the_first_piece_goes_at_once_and_later_ones_together(
    made: Publisher, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = StreamBuffer("a", 1)
    say(stream, "one ")
    made.flush([stream])
    assert writer.text("a") == "one "
    for word in ("two ", "three "):
        say(stream, word)
        made.flush([stream])
    assert writer.calls == 1
    monkeypatch.setattr(time, "monotonic", lambda: 100.1)
    made.flush([stream])
    assert [entry.seq for entry in writer.entries] == [1, 2]
    assert writer.entries[1].payload == {"p": [{"i": 0, "c": "two three "}]}


def test_all_jobs_go_in_one_round_trip(made: Publisher, writer: Writer) -> None:
    streams = [StreamBuffer(f"j{i}", 1) for i in range(50)]
    for stream in streams:
        say(stream, "x")
    made.flush(streams)
    assert (writer.calls, len(writer.entries)) == (1, 50)


def test_choices_are_kept_apart(made: Publisher, writer: Writer) -> None:
    stream = StreamBuffer("a", 2)
    stream.add([Delta(1, content="b"), Delta(0, reasoning="hm"), Delta(1, finish_reason="stop")])
    made.flush([stream])
    (entry,) = writer.entries
    assert (entry.attempt, entry.seq) == (2, 1)
    assert entry.payload == {"p": [{"i": 0, "r": "hm"}, {"i": 1, "c": "b", "f": "stop"}]}


def test_while_redis_is_away_text_comes_together_in_order(made: Publisher, writer: Writer) -> None:
    stream, words = StreamBuffer("a", 1), [f"{i} " for i in range(500)]
    writer.away = True
    for word in words:
        say(stream, word)
        with pytest.raises(redis.ConnectionError):
            made.flush([stream], everything=True)
    writer.away = False
    made.flush([stream], everything=True)
    assert writer.text("a") == "".join(words)
    assert [entry.seq for entry in writer.entries] == [1, 2]


def test_a_stream_that_was_taken_over_is_left_alone(made: Publisher, writer: Writer) -> None:
    stream = StreamBuffer("a", 1)
    writer.refuses = {"a"}
    for _ in range(3):
        say(stream, "x" * 100)
        made.flush([stream])
    assert len(writer.entries) == 1
