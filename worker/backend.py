"""The interface between the queue side of a worker and what generates.

`worker.host.engine_host` implements it with engines of this process, `worker.upstream.host` with a
server behind HTTP. The service, queue and recorder import these types and no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jobs.api.answer import Usage
from jobs.api.sampling import Sampling
from jobs.errors import JobError
from jobs.operations import Operation, Request, Result
from jobs.stream.delta import Delta
from worker.model_spec import ModelSpec

UNKNOWN_CONTEXT = 2**31 - 1  # tokens of a model whose server does not say it


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model, as results and status describe it."""

    name: str  # of the folder or repository; queues and requests use it or the reference
    reference: str  # folder, repo id or file that it was loaded from
    revision: str | None
    family: str
    parameters: int
    weight_bytes: int
    dtype: str  # of the computation, then the quantised types: "bfloat16, Q8_0"; "" if unknown
    device: str
    device_name: str
    context_length: int
    fingerprint: str  # of the weight files
    tokenizer_hash: str | None
    template_hash: str | None
    engine: str
    engine_version: str | None
    torch_version: str | None
    cuda_version: str | None
    takes_templates: bool = False  # of requests

    @property
    def described(self) -> str:
        """For people who start a worker."""
        if not self.parameters:
            known = self.context_length < UNKNOWN_CONTEXT
            context = f"context {self.context_length}" if known else "context unknown"
            return f"{self.name}: {self.reference} of {self.device_name}, {context}"
        return (
            f"{self.name}: {self.family}, {self.parameters / 1e6:.1f} M parameters, {self.dtype} "
            f"on {self.device} ({self.device_name}), context {self.context_length}"
        )


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory that a model will take on the device, in bytes. Nothing of it is allocated yet."""

    name: str
    reference: str
    weights: int  # with those of its draft
    activations: int  # peak of a step
    least_cache: int  # without which the model is not loaded under a budget
    most_cache: int  # that a full batch of its longest sequences takes
    activations_measured: bool = False  # on this machine; else they are estimated


@dataclass(frozen=True, slots=True)
class Reservation:
    """The bytes of a budget that are kept for a model while it is in memory."""

    fixed: int  # weights and activations
    least_cache: int
    cache: int  # its fair part of the memory of all caches
    cache_limit: int | None = None  # of its own, which the cache has to itself


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The cache of one model, in bytes."""

    used: int
    limit: int  # now: what the other models do not hold
    least: int  # that are kept for it


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of the device, in bytes."""

    device: str
    weights: int
    cache: int
    cache_limit: int  # of all models together
    free: int  # within the budget
    budget: int | None = None  # that all models together may take; None: no limit was given
    caches: Mapping[str, CacheUse] = field(default_factory=dict)  # by the names of the models
    host_limit: int | None = None  # of host memory for models that are unloaded
    kept: Mapping[str, int] = field(default_factory=dict)  # bytes there, by the names of the models


@dataclass(frozen=True, slots=True)
class Health:
    """State of the engine thread. It hangs if it has sequences, loads no model and `progress` does
    not change."""

    alive: bool
    progress: int  # number of steps, and of prompts and items prepared
    running: int  # sequences in the batch
    waiting: int  # sequences submitted, not yet in the batch
    tokens_generated: int
    error: str | None = None
    loading: bool = False
    prompt_tokens: int = 0  # of all sequences that have run
    cached_tokens: int = 0  # of these, how many were not computed but read from the prefix cache
    drafted_tokens: int = 0  # proposed by drafts
    accepted_tokens: int = 0  # of these, how many were right
    draft_steps: int = 0  # in which drafts were verified, counted for each sequence
    obstacle: str = ""  # why no request can be started for now; jobs are claimed again after it


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a request. Exactly one of `result` and `error` is set; `partial` holds what a
    cancelled or failed request had generated."""

    result: Result | None = None
    error: JobError | None = None
    partial: Result | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[list[int]] = field(default_factory=list)  # per choice
    token_logprobs: list[list[float]] = field(default_factory=list)  # per choice, if requested
    details: list[Usage.CompletionDetails] = field(default_factory=list)  # of usage, per choice
    seed: int | None = None  # the requested seed, or the random one
    started_at: float | None = None  # by jobs.clock, as those below: first prefill
    first_token_at: float | None = None
    finished_at: float | None = None
    sampling: Sampling | None = None  # with the defaults filled in


class MachineError(JobError):
    """Not the request but the machine kept a job from running: no memory for a process, no file
    descriptor. The job can run on another worker."""

    @classmethod
    def of(cls, error: OSError) -> MachineError:
        return cls("internal", f"{type(error).__name__}: {error}")


class TooLong(JobError):
    """A request needs a context of at least `tokens` tokens, and the model of this worker has a
    shorter one: another worker may have it. `rest`: this worker can run all but that part of the
    request; it is submitted again, to a sink that does not hand on."""

    def __init__(self, message: str, param: str | None, tokens: int, *, rest: bool = False) -> None:
        super().__init__("context_length_exceeded", message, param)
        self.tokens, self.rest = tokens, rest

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message, self.param, self.tokens))


class Progress(NamedTuple):
    """The deltas that a request has added, and at its end the outcome."""

    deltas: Sequence[Delta] = ()
    outcome: Outcome | None = None


class Assembly(Protocol):
    """The answer of a request while it is generated. One thread uses it, which is not the engine's:
    a queue of events leads from there."""

    def take(self) -> Progress:
        """The progress that the events since the last call make. Nothing follows the outcome. If
        that is an error, sequences may still run: cancel the request."""


class Sink(Protocol):
    """Told of the progress of one request. hands_on: a request of which a part is too long ends
    with TooLong before anything of it runs, since another worker may run all of it."""

    @property
    def hands_on(self) -> bool: ...

    def pending(self, assembly: Assembly) -> None:
        """Events have come since the last `take`; the last one of a sequence is always announced.
        Called on the engine thread: must not block."""

    def ended(self, outcome: Outcome) -> None:
        """The request has ended before any event: it could not be started."""


class Handle(Protocol):
    """A submitted request."""

    def cancel(self) -> None:
        """Stop as soon as possible. An outcome with a `cancelled` error follows, unless the request
        has ended already."""


class Backend(Protocol):
    """Keeps models loaded and generates with them on a thread of its own. Thread-safe."""

    @property
    def funcs(self) -> Collection[str]:
        """The functions of the operations that it runs, that of chats among them. Jobs of others
        are left to other workers."""

    def health(self) -> Health: ...

    def memory(self) -> MemoryUse: ...

    def load(self, spec: ModelSpec) -> ModelInfo:
        """Load a model, and download it if needed. Raises JobError."""

    def room(self, model: str, *, bulk: bool) -> int:
        """Number of bulk or interactive sequences that can be submitted now; a request has as many
        as its operation's cost."""

    def submit(self, operation: Operation, request: Request, sink: Sink) -> Handle:
        """Queue a request of an operation without waiting. Raises JobError if its model is not
        loaded; otherwise the sink is told of its progress, also of an error of the request."""

    def close(self) -> None:
        """Stop the engine thread and free the device's memory."""


@runtime_checkable
class TokenizingBackend(Backend, Protocol):
    """A backend that has the tokenizers of its models, so that others can have them as well."""

    def prompt_document(self, model: str) -> bytes:
        """All that makes prompts of requests, see `worker.prompt.published`. `model`: its own name.
        Raises JobError if it is not loaded."""


@runtime_checkable
class SwappingBackend(Backend, Protocol):
    """A backend whose models come and go within a budget. A worker with a budget needs one."""

    def footprint(self, spec: ModelSpec) -> Footprint:
        """Find a model and measure it by the headers of its files. Raises JobError."""

    def fetch(self, spec: ModelSpec) -> None:
        """Download a model, so that `load` only reads files. Raises JobError."""

    def reserve(self, spec: ModelSpec, reservation: Reservation) -> None:
        """Keep memory of the budget for a model before it is loaded. Waits until the sequences that
        have it end. Raises JobError if the models in memory leave too little."""

    def unload(self, model: str, coming: ModelSpec | None = None) -> None:
        """Free the memory of a model that has no requests. `model`: its own name. `coming`: another
        one that is loaded next."""
