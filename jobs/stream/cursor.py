"""What one follower of a token stream has been given, and what that makes of the next entry.

No Redis here: `StreamCursor` is fed log entries and at last the completion, and answers chunks.
`jobs.client.follow` feeds it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jobs.api.answer import ChatCompletion, Choice, ChoiceLogprobs, TokenLogprob
from jobs.api.chunk import ChatChunk, ChoiceDelta, ChunkChoice
from jobs.errors import invalid
from jobs.stream.entries import END_SEQ

TAIL_SEQ = END_SEQ - 1  # cursor of the last text, where a usage chunk comes after it

Position = tuple[int, int]  # attempt, seq


def parse_position(text: str) -> Position:
    """The position that a cursor or an entry's id names. Raises InvalidRequest."""
    match = re.fullmatch(r"([0-9]{1,19})-([0-9]{1,19})", text)
    if match is None:
        raise invalid(f"after: a cursor has the form <attempt>-<seq>, got {text[:40]!r}", "after")
    return int(match[1]), int(match[2])


@dataclass(slots=True)
class _Choice:
    """What is known of one choice so far."""

    content: str = ""
    reasoning: str = ""
    logprobs: int = 0
    finished: bool = False
    introduced: bool = False  # a chunk with the role has gone out


class StreamCursor:
    """The place of one follower in one job's stream. `after` is where an earlier follower stopped.

    The follower's text is always a prefix of what the current attempt has generated; a chunk with
    `reset` voids it when that can't be kept up.
    """

    def __init__(
        self, job_id: str, request: dict[str, Any], created: int, after: str | None = None
    ) -> None:
        self._id = f"chatcmpl-{job_id}"
        self._model = str(request.get("model", ""))
        self._created = created
        options = request.get("stream_options")
        self._usage = isinstance(options, dict) and options.get("include_usage") is True
        self._after: Position = parse_position(after) if after else (0, 0)
        self.position: Position = (0, 0)  # of the last entry that was taken
        self._held: int | None = self._after[0] if after else None  # attempt of the follower's text
        self._text_is_known = self._after[1] == 0  # the choices below are what the follower holds
        self._broken = False  # entries of this attempt are missing
        self._choices: dict[int, _Choice] = {}

    def is_next(self, position: Position) -> bool:
        """Whether nothing can lie between the last entry taken and this one."""
        attempt, seq = self.position
        return position == (attempt, seq + 1)

    def take(self, position: Position, payload: dict[str, Any]) -> list[ChatChunk]:
        """The chunks that an entry of the log adds. Entries come in the order of the log."""
        if position <= self.position:
            return []
        attempt, seq = position
        if attempt != self.position[0]:
            self._choices, self._broken, last = {}, False, 0
        else:
            last = self.position[1]
        self.position = position
        if seq == END_SEQ:
            return []
        if seq != last + 1:
            self._broken = True
        if self._broken:
            return []
        if position <= self._after:
            self._absorb(payload)
            if attempt == self._after[0]:
                self._text_is_known = position == self._after
            return []
        reset = self._reset(attempt, seq - 1)
        choices = self._absorb(payload)
        return [*reset, self._chunk(f"{attempt}-{seq}", choices)] if choices else reset

    def complete(self, completion: ChatCompletion, attempt: int) -> list[ChatChunk]:
        """The chunks from here to the whole answer of the job's last attempt."""
        if self._after[0] == attempt and self._after[1] >= TAIL_SEQ:
            chunks = []
        else:
            chunks = self._rest(completion, attempt)
        if self._usage and completion.usage is not None and self._after < (attempt, END_SEQ):
            chunks.append(self._chunk(f"{attempt}-{END_SEQ}", []))
            chunks[-1].usage = completion.usage
        return chunks

    def _rest(self, completion: ChatCompletion, attempt: int) -> list[ChatChunk]:
        chunks: list[ChatChunk] = []
        if attempt != self.position[0]:
            self._choices = {}
        kept = self._text_is_known and all(
            (choice.message.content or "").startswith(self._choice(choice.index).content)
            and (choice.message.reasoning_content or "").startswith(
                self._choice(choice.index).reasoning
            )
            for choice in completion.choices
        )
        if self._held is not None and not kept:
            self._held = -1
        chunks += self._reset(attempt, 0)
        rest = [self._tail(choice) for choice in completion.choices]
        choices = [choice for choice in rest if choice is not None]
        if choices:
            seq = TAIL_SEQ if self._usage else END_SEQ
            chunks.append(self._chunk(f"{attempt}-{seq}", choices))
        return chunks

    def _reset(self, attempt: int, seq: int) -> list[ChatChunk]:
        """The chunk that voids what the follower holds, if that is of no use for this attempt."""
        held, self._held = self._held, attempt
        if held is None or held == attempt:
            return []
        self._choices, self._text_is_known = {}, True
        chunk = self._chunk(f"{attempt}-{seq}", [])
        chunk.reset = True
        return [chunk]

    def _choice(self, index: int) -> _Choice:
        return self._choices.setdefault(index, _Choice())

    def _absorb(self, payload: dict[str, Any]) -> list[ChunkChoice]:
        """Take in an entry's pieces; answers them joined, one per choice."""
        made: dict[int, ChunkChoice] = {}
        for piece in payload.get("p", ()):
            index = piece["i"]
            known = self._choice(index)
            if index not in made:
                made[index] = ChunkChoice(index=index, delta=ChoiceDelta(role=self._role(known)))
            choice = made[index]
            if content := piece.get("c"):
                known.content += content
                choice.delta.content = (choice.delta.content or "") + content
            if reasoning := piece.get("r"):
                known.reasoning += reasoning
                choice.delta.reasoning_content = (choice.delta.reasoning_content or "") + reasoning
            if logprobs := piece.get("l"):
                known.logprobs += len(logprobs)
                tokens = choice.logprobs.content or [] if choice.logprobs else []
                tokens += [TokenLogprob.model_validate(token) for token in logprobs]
                choice.logprobs = ChoiceLogprobs(content=tokens)
            if reason := piece.get("f"):
                known.finished = True
                choice.finish_reason = reason
        return list(made.values())

    def _tail(self, choice: Choice) -> ChunkChoice | None:
        """What the follower lacks of a finished choice."""
        known, message = self._choice(choice.index), choice.message
        content = (message.content or "")[len(known.content) :]
        reasoning = (message.reasoning_content or "")[len(known.reasoning) :]
        tokens = (choice.logprobs.content or [])[known.logprobs :] if choice.logprobs else []
        calls = [
            {"index": number, **call.to_dict()}
            for number, call in enumerate(message.tool_calls or [])
        ]
        if known.finished and not (content or reasoning or tokens or calls):
            return None
        return ChunkChoice(
            index=choice.index,
            delta=ChoiceDelta(
                role=self._role(known),
                content=content or None,
                reasoning_content=reasoning or None,
                tool_calls=calls or None,
            ),
            logprobs=ChoiceLogprobs(content=tokens) if tokens else None,
            finish_reason=None if known.finished else choice.finish_reason,
        )

    def _role(self, known: _Choice) -> Any:
        introduced, known.introduced = known.introduced, True
        return None if introduced else "assistant"

    def _chunk(self, cursor: str, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            cursor=cursor,
        )
