"""The events of a response, made from the stream of its job.

The events, and so their numbers, depend on the request and the answer alone: not on where the
entries of the job's log begin and end, on when a follower came, or on whether the log is still
there. Texts are cut into pieces by their characters for this. So any gateway can go on after any
number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from jobs.api.answer import ChatCompletion
from jobs.errors import JobError
from jobs.gateway.failures import failed
from jobs.gateway.responses.answers import (
    ended,
    finished,
    logprobs_of,
    message_item,
    reasoning_item,
    text_part,
)
from jobs.gateway.responses.asked import Asked

# A piece of a text: a word with the white space before it, at most 32 characters. What follows a
# piece does not change where it ends.
PIECE = re.compile(r"\s{0,16}\S{1,15}(?=\s)|\s{0,16}\S{16}|\s{17}")

Event = dict[str, Any]  # its type, its number and what it has to say
Kind = Literal["reasoning", "message"]


@dataclass(slots=True)
class _Text:
    """An item of text that is being streamed. `waiting`: characters that are no whole piece yet."""

    kind: Kind
    id: str
    index: int  # among the items of the response
    waiting: str = ""
    done: list[str] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}


class Events:
    """Makes the events of one response, in their order. Each is numbered by one more than the one
    before it, from 0."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._number = 0
        self._items = 0
        self._text: _Text | None = None

    def begin(self) -> list[Event]:
        """The events before the answer."""
        started = {**self._asked.response, "status": "in_progress"}
        first = self._asked.response
        events = [self._event("response.created", response=first)]
        if first["background"]:
            events.append(self._event("response.queued", response=first))
        return [*events, self._event("response.in_progress", response=started)]

    def add(self, reasoning: str, content: str) -> list[Event]:
        """The events of a further part of the answer."""
        events: list[Event] = []
        texts: tuple[tuple[Kind, str], ...] = (("reasoning", reasoning), ("message", content))
        for kind, text in texts:
            if not text:
                continue
            if self._text is None or self._text.kind != kind:
                events += self._close("completed", [])
                events += self._open(kind)
            assert self._text is not None
            self._text.waiting += text
            events += self._pieces(self._text)
        return events

    def end(self, completion: ChatCompletion) -> list[Event]:
        """The events after the last part of the answer."""
        response = finished(self._asked, completion)
        logprobs = logprobs_of(completion.choices[0])
        calls = []
        events: list[Event] = []
        for item in response["output"]:
            if item["type"] == "function_call":
                calls.append(item)
                continue
            if self._text is None and item["type"] == "message" and not self._items:
                events += self._open("message")  # an empty one
            if self._text is not None and self._text.kind == item["type"]:
                events += self._close(item["status"], logprobs)
        for item in calls:
            events += self._call(item)
        kind = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
        return [*events, self._event(kind, response=response)]

    def fail(self, error: JobError) -> list[Event]:
        """The last event of a response whose job has ended without an answer."""
        return [self._event("response.failed", response=ended(self._asked, error))]

    def interrupt(self, error: JobError) -> Event:
        """The event that ends this stream, though the response goes on. OpenAI has the error in the
        event, Open Responses in its field `error`; the openai package raises the latter."""
        shown = failed(error).error
        said = {name: shown[name] for name in ("code", "message", "param")}
        return {"type": "error", "sequence_number": self._number, **said, "error": shown}

    def _open(self, kind: Kind) -> Iterable[Event]:
        job_id = self._asked.job_id
        item: dict[str, Any]
        part: dict[str, Any]
        if kind == "reasoning":
            item = reasoning_item(job_id, None, "in_progress")
            part = {"type": "reasoning_text", "text": ""}
        else:
            item, part = message_item(job_id, [], "in_progress"), text_part("", [])
        text = self._text = _Text(kind, item["id"], self._items)
        self._items += 1
        yield self._event("response.output_item.added", output_index=text.index, item=item)
        yield self._event("response.content_part.added", **text.place, part=part)

    def _pieces(self, text: _Text) -> Iterable[Event]:
        start = 0
        while found := PIECE.match(text.waiting, start):
            yield self._delta(text, found[0])
            start = found.end()
        text.waiting = text.waiting[start:]

    def _delta(self, text: _Text, piece: str) -> Event:
        text.done.append(piece)
        if text.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **text.place, delta=piece)
        return self._event("response.output_text.delta", **text.place, delta=piece, logprobs=[])

    def _close(self, status: str, logprobs: list[dict[str, Any]]) -> Iterable[Event]:
        text, self._text = self._text, None
        if text is None:
            return
        if text.waiting:
            yield self._delta(text, text.waiting)
        whole = "".join(text.done)
        if text.kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": whole}
            item = reasoning_item(self._asked.job_id, whole, status)
            yield self._event("response.reasoning_text.done", **text.place, text=whole)
        else:
            part = text_part(whole, logprobs)
            item = message_item(self._asked.job_id, [part], status)
            yield self._event(
                "response.output_text.done", **text.place, text=whole, logprobs=logprobs
            )
        yield self._event("response.content_part.done", **text.place, part=part)
        yield self._event("response.output_item.done", output_index=text.index, item=item)

    def _call(self, item: dict[str, Any]) -> Iterable[Event]:
        """A call, which is streamed as a whole."""
        index, self._items = self._items, self._items + 1
        place = {"item_id": item["id"], "output_index": index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        whole = item["arguments"]
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=whole)
        yield self._event(
            "response.function_call_arguments.done", **place, name=item["name"], arguments=whole
        )
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}
