"""Server-sent events, read from the bytes of a response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from jobs.errors import JobError
from jobs.sizes import size_text

MAX_EVENT_BYTES = 64 << 20  # log-probabilities of a long answer may come in one event
DONE = b"[DONE]"


class EventReader:
    """Splits bytes into the data of events. Lines end with LF or CR LF only: texts may have other
    line breaks."""

    def __init__(self) -> None:
        self._rest = b""  # of the last line
        self._data: list[bytes] = []  # of the event that has not ended
        self._size = 0

    def push(self, part: bytes) -> Iterator[bytes]:
        """Yield the data of the events that end in `part`. Raises JobError for one too large."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                yield from self.end()
                continue
            name, _, value = line.partition(b":")
            if name == b"data":  # other fields, and comments, have no meaning here
                self._add(value.removeprefix(b" "))
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise JobError("internal", f"an event is larger than {size_text(MAX_EVENT_BYTES)}")

    def end(self) -> Iterator[bytes]:
        """Yield the data of the event that has not ended, if there is any."""
        if self._data:
            data, self._data, self._size = b"\n".join(self._data), [], 0
            yield data

    def _add(self, value: bytes) -> None:
        self._data.append(value)
        self._size += len(value)


async def read_events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event, up to the one that ends the stream. Raises JobError if an event is
    too large."""
    reader = EventReader()
    async for part in parts:
        for data in reader.push(part):
            yield data
            if data == DONE:
                return
