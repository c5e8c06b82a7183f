"""The position of one follower in a job's token stream, and the chunks it still lacks.

Free of Redis: `StreamCursor` is given the entries of the log and finally the completion, and
returns chunks. `jobs.client.follow` drives it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jobs.api.answer import ChatCompletion, Choice, FinishReason, TokenLogprob
from jobs.api.chunk import ChatChunk, ToolCallDelta
from jobs.stream.chunks import ChunkBuilder
from jobs.stream.delta import Delta, join
from jobs.stream.entries import END_SEQ, Entry, Position, parse_position

TAIL_SEQ = END_SEQ - 1  # cursor of the last text if a usage chunk follows it


@dataclass(slots=True)
class _Output:
    """The output of one choice so far."""

    content: str = ""
    reasoning: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, choice: Choice, completion: ChatCompletion) -> _Output:
        """All that a finished choice has generated."""
        message = choice.message
        return cls(
            message.content or "",
            message.reasoning_content or "",
            list((choice.logprobs.content if choice.logprobs else None) or ()),
            [
                ToolCallDelta(index=index, **dict(call))
                for index, call in enumerate(message.tool_calls or ())
            ],
            choice.finish_reason,
            choice.token_ids or [],
            (completion.prompt_token_ids or []) if choice.index == 0 else [],
        )

    def add(self, delta: Delta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.logprobs += delta.logprobs
        self.calls += delta.tool_calls
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.token_ids += delta.token_ids
        self.prompt_token_ids += delta.prompt_token_ids

    def begins(self, other: _Output) -> bool:
        """True if `other` is this output, or continues it. Log-probabilities may differ a little
        between two computations of the same tokens."""
        if self.finish_reason is not None and self.finish_reason != other.finish_reason:
            return False
        tokens = [one.token for one in self.logprobs]
        return (
            other.content.startswith(self.content)
            and other.reasoning.startswith(self.reasoning)
            and [one.token for one in other.logprobs[: len(tokens)]] == tokens
            and other.calls[: len(self.calls)] == self.calls
            and other.token_ids[: len(self.token_ids)] == self.token_ids
            and self.prompt_token_ids in ([], other.prompt_token_ids)
        )

    def rest(self, index: int, held: _Output) -> Delta | None:
        """The output of the choice of this index after `held`, its prefix, as a delta; None if
        there is none."""
        delta = Delta(
            index,
            self.content[len(held.content) :],
            self.reasoning[len(held.reasoning) :],
            tuple(self.logprobs[len(held.logprobs) :]),
            None if held.finish_reason else self.finish_reason,
            tuple(self.calls[len(held.calls) :]),
            tuple(self.token_ids[len(held.token_ids) :]),
            () if held.prompt_token_ids else tuple(self.prompt_token_ids),
        )
        return None if delta == Delta(index) else delta


_Outputs = dict[int, _Output]  # by choice


class StreamCursor:
    """Position of one follower in one job's stream. `after`: cursor to resume from.

    The follower's text is always a prefix of the output of one attempt. A new attempt repeats the
    job from its first token: what the follower holds already is skipped, and the stream goes on
    from there. If the attempt differs from what the follower holds, a chunk with `reset` discards
    that, and the output follows from its start.
    """

    def __init__(
        self, job_id: str, request: dict[str, Any], created: int, after: str | None = None
    ) -> None:
        self._chunks = ChunkBuilder(job_id, str(request.get("model", "")), created)
        options = request.get("stream_options")
        self._usage = isinstance(options, dict) and options.get("include_usage") is True
        self._after: Position = parse_position(after) if after else (0, 0)
        self.position: Position = (0, 0)  # of the last entry taken
        self.attempt = 0  # the job's last one; output of earlier ones is no longer given out
        self._has_gap = False  # entries of this attempt are missing
        self._held: _Outputs = {}  # what the follower holds
        self._held_is_known = self._after[1] == 0
        self._repeated: _Outputs | None = None  # of an attempt that has not shown all of it yet

    def is_next(self, position: Position) -> bool:
        """True if no entry can be missing between the last one taken and this one."""
        attempt, seq = self.position
        return position == (attempt, seq + 1)

    def take(self, entry: Entry) -> list[ChatChunk]:
        """The chunks for one entry. Entries must come in the order of the log; duplicates are
        ignored."""
        if entry.position <= self.position:
            return []
        last = self.position[1] if entry.attempt == self.position[0] else 0
        if last == 0:
            self._has_gap = False
            self._repeated = {} if self._held or not self._held_is_known else None
        self.position = entry.position
        self._has_gap = self._has_gap or (entry.seq != last + 1 and not entry.is_end)
        if entry.is_end or self._has_gap:
            return []
        if entry.position <= self._after:
            if entry.attempt == self._after[0]:
                _add(self._held, entry.deltas)
                self._chunks.skip(entry.deltas)
                self._held_is_known = entry.position == self._after
                self._repeated = None
            return []
        if entry.attempt < self.attempt:
            return []
        if self._repeated is None:
            _add(self._held, entry.deltas)
            return [self._chunks.chunk(join(entry.deltas), entry.id)] if entry.deltas else []
        _add(self._repeated, entry.deltas)
        return self._compare(self._repeated, entry)

    def complete(self, completion: ChatCompletion, attempt: int) -> list[ChatChunk]:
        """The remaining chunks, from the completion of the job's last attempt."""
        chunks: list[ChatChunk] = []
        if self._after[0] != attempt or self._after[1] < TAIL_SEQ:
            whole = {choice.index: _Output.of(choice, completion) for choice in completion.choices}
            if not self._agrees(whole):
                chunks.append(self._discard(attempt))
            chunks += self._advance(whole, f"{attempt}-{TAIL_SEQ if self._usage else END_SEQ}")
        if self._usage and completion.usage is not None and self._after < (attempt, END_SEQ):
            chunks.append(self._chunks.usage(completion, f"{attempt}-{END_SEQ}"))
        return chunks

    def _compare(self, repeated: _Outputs, entry: Entry) -> list[ChatChunk]:
        """The chunks that a new attempt adds to what the follower holds: none until the attempt has
        shown all of that, so that each cursor stands for what one attempt has generated."""
        if self._agrees(repeated):
            self._repeated = None
            return self._advance(repeated, entry.id)
        if self._held_is_known and all(
            output.begins(self._held.get(index, _Output()))
            or self._held.get(index, _Output()).begins(output)
            for index, output in repeated.items()
        ):
            return []
        self._repeated = None
        return [self._discard(entry.attempt), *self._advance(repeated, entry.id)]

    def _agrees(self, outputs: _Outputs) -> bool:
        """True if these outputs are those that the follower holds, or continue them."""
        return self._held_is_known and all(
            held.begins(outputs.get(index, _Output())) for index, held in self._held.items()
        )

    def _advance(self, outputs: _Outputs, cursor: str) -> list[ChatChunk]:
        """The part of these outputs that the follower lacks, as a chunk, if there is any."""
        rests = [
            output.rest(index, self._held.get(index, _Output()))
            for index, output in sorted(outputs.items())
        ]
        self._held = outputs
        deltas = [rest for rest in rests if rest is not None]
        return [self._chunks.chunk(deltas, cursor)] if deltas else []

    def _discard(self, attempt: int) -> ChatChunk:
        """A chunk that discards all that the follower holds."""
        self._held, self._held_is_known = {}, True
        return self._chunks.reset(f"{attempt}-0")


def _add(outputs: _Outputs, deltas: Iterable[Delta]) -> None:
    for delta in deltas:
        outputs.setdefault(delta.choice, _Output()).add(delta)
