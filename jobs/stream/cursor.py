"""The position of one follower in a job's token stream, and the chunks it still lacks.

Free of Redis: `StreamCursor` is given the entries of the log and finally the completion, and
returns chunks. `jobs.client.follow` drives it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jobs.api.answer import ChatCompletion, Choice
from jobs.api.chunk import ChatChunk, ToolCallDelta
from jobs.stream.chunks import ChunkBuilder
from jobs.stream.delta import Delta, join
from jobs.stream.entries import END_SEQ, Entry, Position, parse_position

TAIL_SEQ = END_SEQ - 1  # cursor of the last text if a usage chunk follows it


@dataclass(slots=True)
class _Choice:
    """What the log has shown of one choice so far."""

    content: str = ""
    reasoning: str = ""
    logprobs: int = 0
    calls: list[str] = field(default_factory=list)  # ids of tool calls
    finished: bool = False

    def is_prefix_of(self, choice: Choice) -> bool:
        message = choice.message
        return (
            (message.content or "").startswith(self.content)
            and (message.reasoning_content or "").startswith(self.reasoning)
            and [call.id for call in message.tool_calls or ()][: len(self.calls)] == self.calls
        )


class StreamCursor:
    """Position of one follower in one job's stream. `after`: cursor to resume from.

    The follower's text is always a prefix of the output of the current attempt. Where that is
    impossible, a chunk with `reset` discards the text.
    """

    def __init__(
        self, job_id: str, request: dict[str, Any], created: int, after: str | None = None
    ) -> None:
        self._chunks = ChunkBuilder(job_id, str(request.get("model", "")), created)
        options = request.get("stream_options")
        self._usage = isinstance(options, dict) and options.get("include_usage") is True
        self._after: Position = parse_position(after) if after else (0, 0)
        self.position: Position = (0, 0)  # of the last entry taken
        self._held: int | None = self._after[0] if after else None  # attempt of the follower's text
        self._text_is_known = self._after[1] == 0  # _choices is what the follower holds
        self._has_gap = False  # entries of this attempt are missing
        self._choices: dict[int, _Choice] = {}

    def is_next(self, position: Position) -> bool:
        """Whether no entry can be missing between the last one taken and this one."""
        attempt, seq = self.position
        return position == (attempt, seq + 1)

    def take(self, entry: Entry) -> list[ChatChunk]:
        """The chunks for one entry. Entries must come in the order of the log; duplicates are
        ignored."""
        if entry.position <= self.position:
            return []
        if entry.attempt != self.position[0]:
            self._start_over()
            self._has_gap, last = False, 0
        else:
            last = self.position[1]
        self.position = entry.position
        if entry.is_end:
            return []
        if entry.seq != last + 1:
            self._has_gap = True
        if self._has_gap:
            return []
        if entry.position <= self._after:
            self._record(entry.deltas)
            self._chunks.skip(entry.deltas)
            if entry.attempt == self._after[0]:
                self._text_is_known = entry.position == self._after
            return []
        chunks = self._reset(entry.attempt, entry.seq - 1)
        if entry.deltas:
            self._record(entry.deltas)
            chunks.append(self._chunks.chunk(join(entry.deltas), entry.id))
        return chunks

    def complete(self, completion: ChatCompletion, attempt: int) -> list[ChatChunk]:
        """The remaining chunks, from the completion of the job's last attempt."""
        if self._after[0] == attempt and self._after[1] >= TAIL_SEQ:
            chunks = []
        else:
            chunks = self._rest(completion, attempt)
        if self._usage and completion.usage is not None and self._after < (attempt, END_SEQ):
            chunks.append(self._chunks.usage(completion, f"{attempt}-{END_SEQ}"))
        return chunks

    def _rest(self, completion: ChatCompletion, attempt: int) -> list[ChatChunk]:
        if attempt != self.position[0]:
            self._start_over()
        is_prefix = self._text_is_known and all(
            self._choice(choice.index).is_prefix_of(choice) for choice in completion.choices
        )
        if self._held is not None and not is_prefix:
            self._held = -1  # of no attempt: forces a reset
        chunks = self._reset(attempt, 0)
        tails = [self._tail(choice) for choice in completion.choices]
        deltas = [tail for tail in tails if tail is not None]
        if deltas:
            seq = TAIL_SEQ if self._usage else END_SEQ
            chunks.append(self._chunks.chunk(deltas, f"{attempt}-{seq}"))
        return chunks

    def _reset(self, attempt: int, seq: int) -> list[ChatChunk]:
        """A reset chunk if the follower holds text of another attempt, else nothing."""
        held, self._held = self._held, attempt
        if held is None or held == attempt:
            return []
        self._choices, self._text_is_known = {}, True
        return [self._chunks.reset(f"{attempt}-{seq}")]

    def _start_over(self) -> None:
        self._choices = {}
        self._chunks.restart()

    def _choice(self, index: int) -> _Choice:
        return self._choices.setdefault(index, _Choice())

    def _record(self, deltas: Iterable[Delta]) -> None:
        """Add the deltas of an entry to what is known of their choices."""
        for delta in deltas:
            known = self._choice(delta.choice)
            known.content += delta.content
            known.reasoning += delta.reasoning
            known.logprobs += len(delta.logprobs)
            known.calls += [call.id for call in delta.tool_calls]
            known.finished = known.finished or delta.finish_reason is not None

    def _tail(self, choice: Choice) -> Delta | None:
        """What the follower lacks of a finished choice; None if nothing."""
        known, message = self._choice(choice.index), choice.message
        content = (message.content or "")[len(known.content) :]
        reasoning = (message.reasoning_content or "")[len(known.reasoning) :]
        tokens = (choice.logprobs.content or [])[known.logprobs :] if choice.logprobs else []
        calls = tuple(
            ToolCallDelta(index=index, **dict(call))
            for index, call in enumerate(message.tool_calls or ())
            if index >= len(known.calls)
        )
        if known.finished and not (content or reasoning or tokens or calls):
            return None
        finish_reason = None if known.finished else choice.finish_reason
        return Delta(choice.index, content, reasoning, tuple(tokens), finish_reason, calls)
