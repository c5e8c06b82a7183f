"""Deltas into entries: when they are sent, and what happens while Redis is unavailable."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
import redis

from jobs.stream.delta import Delta
from jobs.stream.entries import Entry
from worker.queue.publisher import Publisher, StreamBuffer


class Writer:
    """Stands in for StreamWriter."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.calls = 0
        self.down = False
        self.refuses: set[str] = set()

    def write_many(self, entries: Sequence[Entry]) -> list[bool]:
        self.calls += 1
        if self.down:
            raise redis.ConnectionError("down")
        self.entries += entries
        return [entry.job not in self.refuses for entry in entries]

    def text(self, job: str) -> str:
        return "".join(
            delta.content for entry in self.entries if entry.job == job for delta in entry.deltas
        )


@pytest.fixture
def writer() -> Writer:
    return Writer()


@pytest.fixture
def publisher(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> Publisher:
    """A publisher with a stopped clock."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    return Publisher(writer)  # type: ignore[arg-type]


def add(stream: StreamBuffer, text: str, **more: Any) -> None:
    stream.add([Delta(0, content=text, **more)])


def test_the_first_delta_is_sent_at_once_and_later_ones_joined(
    publisher: Publisher, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = StreamBuffer("a", 1)
    add(stream, "one ")
    publisher.flush([stream])
    assert writer.text("a") == "one "
    for word in ("two ", "three "):
        add(stream, word)
        publisher.flush([stream])
    assert writer.calls == 1
    monkeypatch.setattr(time, "monotonic", lambda: 100.1)
    publisher.flush([stream])
    assert [entry.seq for entry in writer.entries] == [1, 2]
    assert json.loads(writer.entries[1].payload()) == {"p": [{"i": 0, "c": "two three "}]}


def test_entries_of_all_jobs_go_out_in_one_round_trip(publisher: Publisher, writer: Writer) -> None:
    streams = [StreamBuffer(f"j{i}", 1) for i in range(50)]
    for stream in streams:
        add(stream, "x")
    publisher.flush(streams)
    assert (writer.calls, len(writer.entries)) == (1, 50)


def test_deltas_are_joined_per_choice(publisher: Publisher, writer: Writer) -> None:
    stream = StreamBuffer("a", 2)
    stream.add([Delta(1, content="b"), Delta(0, reasoning="hm"), Delta(1, finish_reason="stop")])
    publisher.flush([stream])
    (entry,) = writer.entries
    assert (entry.attempt, entry.seq) == (2, 1)
    wire = {"p": [{"i": 0, "r": "hm"}, {"i": 1, "c": "b", "f": "stop"}]}
    assert json.loads(entry.payload()) == wire


def test_deltas_are_joined_while_redis_is_down(publisher: Publisher, writer: Writer) -> None:
    stream, words = StreamBuffer("a", 1), [f"{i} " for i in range(500)]
    writer.down = True
    for word in words:
        add(stream, word)
        with pytest.raises(redis.ConnectionError):
            publisher.flush([stream], everything=True)
    writer.down = False
    publisher.flush([stream], everything=True)
    assert writer.text("a") == "".join(words)
    assert [entry.seq for entry in writer.entries] == [1, 2]


def test_a_refused_stream_is_not_written_again(publisher: Publisher, writer: Writer) -> None:
    stream = StreamBuffer("a", 1)
    writer.refuses = {"a"}
    for _ in range(3):
        add(stream, "x" * 100)
        publisher.flush([stream])
    assert len(writer.entries) == 1
