"""One resident model and the loop that generates with it.

`Engine` is the table of contents: requests come in (`submit`, and on top of it chat, stream,
generate), `step` schedules, computes, samples and hands tokens on. Steps never overlap: whoever
drives them, the service's engine thread or a caller in-process, holds the lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import torch
from torch import Tensor

from jobs.api.answer import ChatCompletion
from jobs.api.chunk import ChatChunk
from jobs.api.request import ChatRequest
from jobs.api.sampling import Sampling
from jobs.errors import JobError, invalid
from jobs.stream.chunks import ChunkBuilder
from worker.backend import Generation, ModelInfo, Sink, Token
from worker.engine.chat_generation import ChatGeneration
from worker.engine.collect import Cancellable, Collected, CollectingSink
from worker.engine.kv_pool import CachePool
from worker.engine.sampler import sample
from worker.engine.sampling_plan import SamplingPlan, plan_sampling
from worker.engine.scheduler import Scheduler
from worker.engine.scorer import Scorer, token_ids
from worker.engine.sequence import Sequence
from worker.layers.batch import Batch, Span
from worker.loading.tokenizer import Tokenizer
from worker.resident import device as devices
from worker.resident.load import ResidentModel, load
from worker.resident.process import share_cores
from worker.text.detokenizer import Detokenizer

logger = logging.getLogger(__name__)

MAX_BATCH = {"cpu": 16, "cuda": 128}  # sequences that run together
STEP_TOKENS = {"cpu": 512, "cuda": 8192}  # tokens that one step computes at most
LINE = 2  # one sequence may wait for so many in the batch


class Engine:
    """Generates with one model. Thread-safe; see `load`."""

    def __init__(
        self, resident: ResidentModel, *, max_batch: int, context: int, cache_bytes: int
    ) -> None:
        self.info: ModelInfo = resident.info
        self.tokenizer: Tokenizer = resident.tokenizer
        self.context_length = context
        self.on_work: Callable[[], None] = lambda: None  # told when there is something to step
        self.steps = 0
        self.tokens_generated = 0
        self.max_batch = max_batch
        self._resident = resident
        self._prompts = resident.prompts(context)
        self._model, self._device = resident.model, resident.device
        self._vocab_size = resident.model.vocab_size  # may be more than the tokenizer knows
        self._pool = CachePool(
            resident.model.make_caches,
            max_slots=max_batch + 1,  # one for scoring, beside the batch
            max_columns=context,
            limit_bytes=cache_bytes,
        )
        self._scorer = Scorer(
            resident.model, self._pool, resident.device, context, resident.not_finite
        )
        self._scheduler = Scheduler(self._pool, max_batch, STEP_TOKENS[self._device.type])
        self._lock = threading.Lock()
        self._inbox: deque[Sequence] = deque()  # from any thread, to the one that steps

    @classmethod
    def load(
        cls,
        reference: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_batch: int | None = None,
        context: int | None = None,
        cache_bytes: int | None = None,
        download_dir: Path | None = None,
    ) -> Engine:
        """Make a model resident: a folder, a hub repo id (`org/name[@revision]`) or `demo`.

        dtype: auto, bf16, fp16 or fp32. max_batch: sequences that run together. context: tokens
        that a sequence may have, at most the model's own. cache_bytes: limit of the KV cache.
        download_dir: where models of the hub are kept; None is the hub library's own cache.
        Raises JobError.
        """
        place = devices.choose_device(device)
        resident = load(reference, place, dtype, download_dir)
        if place.type == "cpu":
            share_cores(resident.info.weight_bytes)
        longest = resident.model.context_length
        if context is not None and not 1 < context <= longest:
            raise invalid(
                f"context must be 2 to {longest} for this model, got {context}", "context"
            )
        if max_batch is not None and max_batch < 1:
            raise invalid(f"max_batch must be at least 1, got {max_batch}", "max_batch")
        limit = devices.cache_limit(place) if cache_bytes is None else cache_bytes
        batch = max_batch or MAX_BATCH[place.type]
        return cls(resident, max_batch=batch, context=context or longest, cache_bytes=limit)

    # --- what callers ask for ---------------------------------------------------------------------

    def chat(self, request: ChatRequest) -> ChatCompletion:
        """Run one request to its end. Raises JobError."""
        sink = CollectingSink()
        flight = self.submit(request, sink)
        self._drive(lambda: flight.done, [flight])
        return sink.completion()

    def stream(self, request: ChatRequest) -> Iterator[ChatChunk]:
        """The answer in pieces, as they are generated. Raises JobError, before or within."""
        sink = CollectingSink()
        flight = self.submit(request, sink)
        chunks = ChunkBuilder(request.job.id or "local", request.model, int(time.time()))
        try:
            while not flight.done:
                self.step()
                yield from (chunks.chunk([delta]) for delta in sink.take())
            yield from (chunks.chunk([delta]) for delta in sink.take())
        finally:
            flight.cancel()
        completion = sink.completion()
        if request.stream_options is not None and request.stream_options.include_usage:
            yield chunks.usage(completion)

    def generate(
        self, prompts: SequenceOf[SequenceOf[int]], sampling: Sampling | SequenceOf[Sampling]
    ) -> list[Generation]:
        """Continue prompts of token ids; `sampling` is one for all or one per prompt. With n > 1
        a prompt's choices follow one another. Raises JobError, the first one of any prompt."""
        plans = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(plans) != len(prompts):
            raise invalid(f"got {len(prompts)} prompts and {len(plans)} samplings", "sampling")
        collected: list[Collected] = []
        sequences: list[Sequence] = []
        for prompt, wanted in zip(prompts, plans, strict=True):
            ids = self._ids(prompt)
            plan = self._plan(wanted, ids)
            for choice in range(plan.n):
                collect = Collected()
                collected.append(collect)
                detokenizer = Detokenizer(self.tokenizer)
                sequences.append(Sequence(ids, plan, choice, detokenizer, collect.listen))
        self._add(sequences)
        self._drive(lambda: all(sequence.ended for sequence in sequences), sequences)
        return [collect.generation() for collect in collected]

    def generate_stream(self, prompt: SequenceOf[int], sampling: Sampling) -> Iterator[Token]:
        """Continue one prompt of token ids, token by token (the first choice only)."""
        collect, ids = Collected(), self._ids(prompt)
        plan = self._plan(sampling, ids)
        sequence = Sequence(ids, plan, 0, Detokenizer(self.tokenizer), collect.listen)
        self._add([sequence])
        sent = 0
        try:
            while not sequence.ended or sent < len(collect.steps):
                if sent == len(collect.steps):
                    self.step()
                for step in collect.steps[sent:]:
                    sent += 1
                    if step.error is not None:
                        raise step.error
                    assert step.sampled is not None
                    drawn = step.sampled
                    yield Token(drawn.token_id, step.text, drawn.logprob, step.finish_reason)
        finally:
            sequence.cancel()

    def score(self, prompt: SequenceOf[int], target: SequenceOf[int]) -> list[float]:
        """Log-probability of each target token after the prompt and the targets before it.
        Raises JobError."""
        given, wanted = self._ids(prompt), self._ids(target, "target", minimum=0)
        with self._lock:
            return self._scorer.score(given, wanted)

    def prompt_logits(self, prompt: SequenceOf[int]) -> Tensor:
        """Logits after each token of the prompt: float32 [len, vocab], on the CPU.
        Raises JobError."""
        given = self._ids(prompt)
        with self._lock:
            return self._scorer.prompt_logits(given)

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        """The token ids that the request's messages make. Raises JobError."""
        return self._prompts.build(request).token_ids

    def submit(self, request: ChatRequest, sink: Sink) -> ChatGeneration:
        """Check a request and put it in line; `sink` hears of everything on the thread that steps.
        Raises JobError if it can't run."""
        prompt = self._prompts.build(request)
        plan = self._plan(request, prompt.token_ids)
        flight = ChatGeneration(
            request,
            plan,
            prompt.token_ids,
            self.tokenizer,
            self._resident.splitter_maker(prompt.text),
            sink,
            fingerprint=self.info.fingerprint,
        )
        sequences = [
            Sequence(prompt.token_ids, plan, i, Detokenizer(self.tokenizer), flight.listener(i))
            for i in range(plan.n)
        ]
        flight.attach(sequences)
        self._add(sequences)
        return flight

    # --- the loop ---------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Sequences in line, those that no step has seen yet included."""
        return len(self._scheduler.waiting) + len(self._inbox)

    @property
    def room(self) -> int:
        """How many more sequences fit into the batch and the short line before it, which keeps
        the batch full while the next ones are fetched."""
        line = self.max_batch // LINE
        return max(0, self.max_batch + line - self.running - self.waiting)

    @property
    def cache_bytes(self) -> tuple[int, int]:
        """Bytes that caches hold, and their limit."""
        return self._pool.bytes_held, self._pool.limit_bytes

    def step(self) -> bool:
        """One round: admit, compute, sample, hand on. False if there was nothing to do."""
        with self._lock:
            self._take_in()
            plan = self._scheduler.schedule()
            if plan:
                self.steps += 1
                try:
                    self._advance(plan)
                except Exception as error:  # a bad sequence must not take its neighbours with it
                    self._step_failed(error)
            return bool(plan)

    def close(self) -> None:
        """Fail what is under way and free the device's memory."""
        with self._lock:
            self._take_in()
            error = JobError("cancelled", "the engine was closed")
            for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
                sequence.fail(error)
                self._scheduler.remove(sequence)
            del self._model, self._resident, self._pool, self._scheduler.pool, self._scorer
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    @torch.inference_mode()
    def _advance(self, plan: list[tuple[Sequence, int]]) -> None:
        by_slot: dict[int, Sequence] = {}
        spans = []
        for sequence, count in plan:
            assert sequence.slot is not None
            by_slot[sequence.slot] = sequence
            ids = sequence.tokens(sequence.computed, sequence.computed + count)
            spans.append(Span(sequence.slot, sequence.computed, ids, len(sequence.prompt_ids)))
        batch, ordered = Batch.prepare(spans, self._device)
        logits = self._model(batch, self._pool.layers)
        ready, rows = [], []
        for row, span in enumerate(ordered):
            sequence = by_slot[span.slot]
            sequence.computed += span.length
            if not sequence.pending:
                ready.append(sequence)
                rows.append(row)
        if not ready:
            return
        if len(rows) < len(ordered):
            logits = logits[rows]
        for sequence, sampled in zip(ready, sample(logits, [s.draw for s in ready]), strict=True):
            if sampled.finite:
                self.tokens_generated += 1
                sequence.accept(sampled)
                if sequence.ended:
                    self._scheduler.remove(sequence)
            else:
                sequence.fail(self._resident.not_finite(sequence.length))
                self._scheduler.remove(sequence, spoiled=True)

    def _take_in(self) -> None:
        while self._inbox:
            self._scheduler.add(self._inbox.popleft())
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            if sequence.cancelled:
                sequence.fail(JobError("cancelled", "cancelled while it ran"))
                self._scheduler.remove(sequence)

    def _step_failed(self, error: Exception) -> None:
        alone = self._scheduler.running[0] if len(self._scheduler.running) == 1 else None
        if alone is None:
            logger.warning("a step failed (%s); its sequences run again one at a time", error)
            self._scheduler.retreat()
        elif devices.is_out_of_memory(error):
            facts = f"{alone.length} tokens do not fit: {str(error).splitlines()[0]}"
            alone.fail(JobError("out_of_memory", f"{facts}; shorten the prompt or max_tokens"))
        else:
            logger.error("a sequence failed in the engine", exc_info=error)
            alone.fail(JobError("internal", f"the engine failed: {type(error).__name__}: {error}"))
        if alone is not None:
            self._scheduler.remove(alone, spoiled=True)

    # --- small parts ------------------------------------------------------------------------------

    def _add(self, sequences: list[Sequence]) -> None:
        self._inbox.extend(sequences)
        self.on_work()

    def _drive(self, done: Callable[[], bool], held: SequenceOf[Cancellable]) -> None:
        """TokenEvent until done; what was asked for is cancelled if the caller is interrupted."""
        try:
            while not done():
                self.step()
        finally:
            for one in held:
                one.cancel()

    def _ids(self, values: SequenceOf[int], name: str = "prompt", *, minimum: int = 1) -> list[int]:
        ids = token_ids(values, self._vocab_size, name)
        if len(ids) < minimum:
            raise invalid(f"a {name} needs at least one token", name)
        return ids

    def _plan(self, sampling: Sampling, prompt: SequenceOf[int]) -> SamplingPlan:
        return plan_sampling(
            sampling,
            self._resident.defaults,
            prompt_length=len(prompt),
            context_length=self.context_length,
            vocab_size=self._vocab_size,
        )
