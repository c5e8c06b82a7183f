"""Pieces of an answer → OpenAI's chunks, for streams within the process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from jobs.api.answer import ChatCompletion, ChoiceLogprobs, Usage
from jobs.api.chunk import ChatChunk, ChoiceDelta, ChunkChoice
from jobs.api.request import ChatRequest
from worker.backend import Delta


class ChunkMaker:
    """Makes the chunks of one answer; the first of each choice carries the role."""

    def __init__(self, request: ChatRequest, fingerprint: str) -> None:
        self._request, self._fingerprint = request, fingerprint
        self._created = int(time.time())
        self._begun: set[int] = set()

    def chunks(self, pieces: Sequence[Delta]) -> Iterator[ChatChunk]:
        """One chunk per piece."""
        for piece in pieces:
            first = piece.choice not in self._begun
            self._begun.add(piece.choice)
            delta = ChoiceDelta(
                role="assistant" if first else None,
                content=piece.content or ("" if first and not piece.reasoning else None),
                reasoning_content=piece.reasoning or None,
            )
            logprobs = ChoiceLogprobs(content=list(piece.logprobs)) if piece.logprobs else None
            yield self._chunk(
                [
                    ChunkChoice(
                        index=piece.choice,
                        delta=delta,
                        finish_reason=piece.finish_reason,
                        logprobs=logprobs,
                    )
                ]
            )

    def usage(self, completion: ChatCompletion) -> Iterator[ChatChunk]:
        """The closing chunk with the token counts, if it was asked for."""
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield self._chunk([], completion.usage)

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(
            id=f"chatcmpl-{self._request.job.id or 'local'}",
            created=self._created,
            model=self._request.model,
            choices=choices,
            usage=usage,
            system_fingerprint=self._fingerprint,
        )
