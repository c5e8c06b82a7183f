"""The token stream of a job on the wire.

Each entry of the replay log `keys.log(job)` (a Redis stream) has the id `<attempt>-<seq>` and one
field `d`, a JSON object. The same object is published on the channel `keys.live(job)` as
`{"id": "<attempt>-<seq>", "d": {…}}`. `d` has one of two forms:

    {"p": [{"i": 0, "c": "text", "r": "reasoning", "l": [TokenLogprob…], "f": "stop",
      "t": [ToolCallDelta…]}, …]}
    {"end": "stop|length|tool_calls|cancelled|error", "usage": {…}, "error": {…}}

The first form holds the output of one or more engine steps, one `Delta` per choice. Its seq starts
at 1 in each attempt and has no gaps. The second form is the end entry, with seq END_SEQ: the script
that settles the job writes it once. It wakes the followers, which then read the job's state.

Ids only grow, so Redis refuses entries of an earlier attempt and entries after the end.
`jobs.store.stream` appends entries, `jobs.client.follow` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jobs.encoding import to_json
from jobs.errors import JobError, invalid
from jobs.stream.delta import Delta

# Seq of the end entry: the largest integer n such that a double represents all integers up to n
# exactly.
END_SEQ = 2**53 - 1

EndReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]
Position = tuple[int, int]  # attempt, seq


class Entry(NamedTuple):
    """One entry of a job's stream. The end entry has no deltas."""

    job: str
    attempt: int
    seq: int
    deltas: tuple[Delta, ...]

    @property
    def position(self) -> Position:
        return self.attempt, self.seq

    @property
    def id(self) -> str:
        return f"{self.attempt}-{self.seq}"

    @property
    def is_end(self) -> bool:
        return self.seq == END_SEQ

    def payload(self) -> str:
        """The field `d` of an entry with output, as JSON text."""
        return to_json({"p": [delta.to_wire() for delta in self.deltas]})

    @classmethod
    def from_wire(cls, job: str, entry_id: str, payload: Mapping[str, Any]) -> Entry:
        """The entry with this id and this decoded field `d`."""
        attempt, seq = parse_position(entry_id)
        deltas = tuple(Delta.from_wire(delta) for delta in payload.get("p", ()))
        return cls(job, attempt, seq, deltas)


def parse_position(text: str) -> Position:
    """Attempt and seq of a cursor or an entry id. Raises InvalidRequest."""
    match = re.fullmatch(r"([0-9]{1,19})-([0-9]{1,19})", text)
    if match is None:
        raise invalid(f"after: a cursor has the form <attempt>-<seq>, got {text[:40]!r}", "after")
    return int(match[1]), int(match[2])


def is_end_message(message: bytes) -> bool:
    """True if a published message is an end entry. It is not decoded."""
    return f'-{END_SEQ}"'.encode() in message[:48]


def publishes(request: Mapping[str, Any]) -> bool:
    """True if the tokens of a job with this request are published, as `ChatRequest.publishes` says;
    any program may have written the request. A scoring job, which has items, has none."""
    if "items" in request:
        return False
    options, stream = request.get("job"), request.get("stream")
    bulk = isinstance(options, dict) and options.get("priority") == "bulk"
    return stream if isinstance(stream, bool) else not bulk


def end_id(attempt: int) -> str:
    """Id of the end entry of an attempt."""
    return f"{attempt}-{END_SEQ}"


def end_payload(
    reason: EndReason, usage: dict[str, Any] | None = None, error: JobError | None = None
) -> str:
    """The field `d` of the end entry, as JSON text. `usage`: the JSON form of `Usage`."""
    payload: dict[str, Any] = {"end": reason}
    if usage is not None:
        payload["usage"] = usage
    if error is not None:
        payload["error"] = error.to_dict()
    return to_json(payload)
