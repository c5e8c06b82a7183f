"""Builds OpenAI's chunks from deltas, for followers of a job and for streams within a process."""

from __future__ import annotations

from collections.abc import Iterable

from jobs.api.answer import ChatCompletion, ChoiceLogprobs, completion_id
from jobs.api.chunk import ChatChunk, ChoiceDelta, ChunkChoice
from jobs.stream.delta import Delta


class ChunkBuilder:
    """Builds the chunks of one answer.

    The first delta of each choice carries the role. Empty fields are omitted. Only the usage chunk
    has a `system_fingerprint`: followers receive it with the completion.
    """

    def __init__(self, job_id: str | None, model: str, created: int) -> None:
        self._id = completion_id(job_id)
        self._model, self._created = model, created
        self._introduced: set[int] = set()  # choices whose role has been sent

    def chunk(self, deltas: Iterable[Delta], cursor: str | None = None) -> ChatChunk:
        """A chunk with one choice per delta."""
        deltas = [*deltas]
        chunk = self._chunk([self._choice(delta) for delta in deltas], cursor)
        prompt = next((delta.prompt_token_ids for delta in deltas if delta.prompt_token_ids), None)
        chunk.prompt_token_ids = None if prompt is None else list(prompt)
        return chunk

    def usage(self, completion: ChatCompletion, cursor: str | None = None) -> ChatChunk:
        """The closing chunk for `stream_options.include_usage`: token counts, no choices."""
        chunk = self._chunk([], cursor)
        chunk.usage = completion.usage
        chunk.system_fingerprint = completion.system_fingerprint
        return chunk

    def reset(self, cursor: str | None = None) -> ChatChunk:
        """A chunk that discards all previous ones; roles are sent again after it."""
        self._introduced.clear()
        chunk = self._chunk([], cursor)
        chunk.reset = True
        return chunk

    def skip(self, deltas: Iterable[Delta]) -> None:
        """Mark the choices of deltas that the reader has already received as introduced."""
        self._introduced.update(delta.choice for delta in deltas)

    def _choice(self, delta: Delta) -> ChunkChoice:
        first = delta.choice not in self._introduced
        self._introduced.add(delta.choice)
        return ChunkChoice(
            index=delta.choice,
            delta=ChoiceDelta(
                role="assistant" if first else None,
                content=delta.content or None,
                reasoning_content=delta.reasoning or None,
                tool_calls=list(delta.tool_calls) or None,
            ),
            finish_reason=delta.finish_reason,
            logprobs=ChoiceLogprobs(content=list(delta.logprobs)) if delta.logprobs else None,
            token_ids=list(delta.token_ids) or None,
        )

    def _chunk(self, choices: list[ChunkChoice], cursor: str | None) -> ChatChunk:
        return ChatChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, cursor=cursor
        )
