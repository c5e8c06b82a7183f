"""The protocol that the service speaks to: what can generate, whatever it is made of.

`worker.engine` is the implementation; others (a remote engine, another library) may follow. The
service, intake and recorder know these types and nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jobs.api.answer import ChatCompletion, FinishReason
from jobs.api.chunk import ChatChunk
from jobs.api.request import ChatRequest
from jobs.api.sampling import Sampling
from jobs.errors import JobError
from jobs.stream.delta import Delta


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A resident model, as far as results and status need to know it."""

    name: str  # of the folder or repository; queues and requests call it by this or its reference
    reference: str  # folder, repo id or file that it was loaded from
    revision: str | None
    family: str
    parameters: int
    weight_bytes: int
    dtype: str
    device: str
    device_name: str
    context_length: int
    fingerprint: str  # of the weight files
    tokenizer_hash: str
    template_hash: str | None
    engine: str
    engine_version: str
    torch_version: str
    cuda_version: str | None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on the device."""

    device: str
    weights: int
    cache: int
    cache_limit: int
    free: int


@dataclass(frozen=True, slots=True)
class Health:
    """`progress` grows with every step: a loop that is busy and doesn't grow it hangs."""

    alive: bool
    progress: int
    running: int  # sequences in the batch
    waiting: int  # sequences admitted, not yet in the batch
    tokens_generated: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. Exactly one of `completion` and `error` is the answer; a cancelled or
    failed request keeps what it had generated in `partial`."""

    completion: ChatCompletion | None = None
    error: JobError | None = None
    partial: ChatCompletion | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[list[int]] = field(default_factory=list)  # per choice
    token_logprobs: list[list[float]] = field(default_factory=list)  # per choice, if asked for
    seed: int | None = None  # the seed that was used, given or drawn
    started_at: float | None = None  # seconds since the epoch: first prefill
    first_token_at: float | None = None
    finished_at: float | None = None
    sampling: Sampling | None = None  # with the defaults filled in


class Sink(Protocol):
    """Where a flight's events go. Called on the engine's thread: must not block."""

    def deltas(self, pieces: Sequence[Delta]) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...


class Handle(Protocol):
    """A request under way."""

    def cancel(self) -> None:
        """Stop as soon as possible; the sink's `ended` follows with a `cancelled` error, unless the
        request ended before."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    id: int
    text: str  # what it adds to the decoded text; may be empty while a character is incomplete
    logprob: float | None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What was generated after one prompt of token ids."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[float] | None = None


class Backend(Protocol):
    """Something that keeps models loaded and generates with them. All methods are thread-safe."""

    name: str

    def health(self) -> Health: ...

    def models(self) -> list[ModelInfo]: ...

    def memory(self) -> MemoryUse: ...

    def load(self, reference: str) -> ModelInfo:
        """Make a model resident; raises JobError if it can't be."""

    def unload(self, name: str) -> None: ...

    def chat(self, request: ChatRequest) -> ChatCompletion:
        """Run one request to its end; raises JobError."""

    def stream(self, request: ChatRequest) -> Iterator[ChatChunk]: ...

    def generate(
        self, model: str, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]
    ) -> list[Generation]:
        """Continue prompts of token ids; answers in their order."""

    def generate_stream(
        self, model: str, prompt: Sequence[int], sampling: Sampling
    ) -> Iterator[Token]: ...

    def room(self, model: str) -> int:
        """How many more sequences (a request with n choices counts n) fit into the batch now."""

    def submit(self, request: ChatRequest, sink: Sink) -> Handle:
        """Check and start a request without waiting. Raises JobError if it can't run; after it has
        returned, the sink hears of everything, `ended` last and once."""

    def close(self) -> None:
        """Stop the engine thread and free the device."""
