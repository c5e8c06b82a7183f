"""The in-process API: `from worker import Engine`."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import BaseModel
from torch import Tensor, cat

from jobs.api.answer import ChatCompletion
from jobs.api.chunk import ChatChunk
from jobs.api.params import MessageInput
from jobs.api.request import ChatRequest
from jobs.api.sampling import Sampling
from jobs.errors import JobError, invalid
from jobs.sizes import counted
from worker.backend import Sink
from worker.cache.prefix_state import PrefixState
from worker.chat.generation import ChatGeneration, start_chat
from worker.device import Device, choose_device
from worker.engine import prompt_caches
from worker.engine.engine import EngineCore
from worker.engine.sequence import Listener, Sequence, TokenEvent
from worker.engine.token_ids import token_ids
from worker.local.collect import CollectingSink, Generation, Token, generation, streamed
from worker.model_spec import ModelSpec
from worker.named_device import NamedDevice, check_ranks, parse_devices
from worker.prompt.template import template_path
from worker.sampling.params import SamplingParams
from worker.sampling.prompt_logits import PromptLogits, PromptLogprobs, PromptReader
from worker.text.detokenizer import Detokenizer


class Cancellable(Protocol):
    def cancel(self) -> None: ...


@contextmanager
def _on(cores: frozenset[int] | None) -> Iterator[None]:
    """Keep the calling thread on these cores, unless the context fails."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    except BaseException:
        os.sched_setaffinity(0, before)
        raise


class Engine:
    """Generates with one model, on the threads of its callers.

    There is no thread of its own: a call that generates steps the engine until its result is
    complete, and the steps also advance the requests of other callers. A lock keeps steps from
    overlapping, so all methods are thread-safe. Workers use `worker.host` instead, where a single
    thread steps.
    """

    def __init__(self, core: EngineCore) -> None:
        self.info = core.info
        self.tokenizer = core.tokenizer
        self.context_length = core.context_length
        self._core = core
        self._lock = threading.Lock()  # held while stepping or closing

    @classmethod
    def load(
        cls,
        reference: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantize: str | None = None,
        keep_quantised: bool = False,
        max_batch: int | None = None,
        context: int | None = None,
        cache_bytes: int | None = None,
        prefix_cache: bool = True,
        draft: str | None = None,
        draft_tokens: int | None = None,
        download_dir: Path | None = None,
        chat_template: str | Path | None = None,
        trust_request_chat_template: bool = False,
        add_bos: bool | None = None,
        tool_parser: str | None = None,
        tensor_parallel: int = 1,
        devices: str | SequenceOf[str] = (),
    ) -> Engine:
        """Load a model: a folder, a GGUF file, a Hugging Face repo id
        (`org/name[:quantisation][@revision]`) or `demo`.

        dtype: auto, bf16, fp16 or fp32, or torch's name of one. quantize: "q8" stores the weights
        in memory with 8 bits, in GGUF's Q8_0 blocks; those of a GGUF file stay as they are.
        keep_quantised: do not re-encode types of a GGUF file that no kernel multiplies with as
        Q8_0, which saves memory and takes many times as long.
        max_batch: maximum number of sequences that run together. context: maximum tokens per
        sequence, by default the model's own; a model whose config doesn't stretch its positions may
        go beyond, with a warning. cache_bytes: limit of the KV cache and of the state that is
        kept of earlier prompts. prefix_cache: let prompts that begin alike share that state.
        draft: a smaller model with the same vocabulary, which proposes the next tokens, or `ngram`,
        which looks them up in the prompt and the answer; the tokens stay the same. draft_tokens:
        most tokens of a proposal, by default 4.
        download_dir: where models of
        the hub are stored, by default the hub library's cache. chat_template: file with a chat
        template to use instead of the model's own. trust_request_chat_template: requests may bring
        a template of their own, which is rendered in a sandbox. tool_parser: syntax of the model's
        tool calls (hermes, llama3_json, pythonic or qwen3_coder), by default the one that its
        template writes.
        add_bos: whether prompts begin with the BOS token if the template doesn't write it; by
        default as a GGUF file says, and not for other models. tensor_parallel: number of processes
        that compute the model together: this one and children of it, which end with the engine
        (docs/parallel.md). devices: of each of these, such as "cuda:1", or cores of the CPU, such
        as "cpu:0-3"; the calling thread, and threads that it starts, stay on the first ones.
        By default they share the cores of this process, or have the first GPUs.
        Raises JobError.
        """
        named: tuple[NamedDevice, ...] = ()
        if devices:
            if device != "auto":
                raise invalid("device is one and devices are several: give one of them", "devices")
            named = parse_devices(devices if isinstance(devices, str) else ",".join(devices))
            check_ranks(named, tensor_parallel)
            device = named[0].option
        spec = ModelSpec(
            reference=reference,
            dtype=dtype,
            quantize=quantize,
            keep_quantised=keep_quantised,
            max_batch=max_batch,
            context=context,
            cache_bytes=cache_bytes,
            prefix_cache=prefix_cache,
            draft=draft,
            draft_tokens=draft_tokens,
            download_dir=download_dir,
            chat_template=None if chat_template is None else template_path(chat_template),
            trust_request_chat_template=trust_request_chat_template,
            add_bos=add_bos,
            tool_parser=tool_parser,
            tensor_parallel=tensor_parallel,
            rank_devices=named,
        )
        spec.require_types()
        with _on(named[0].cores if named else None):
            return cls(EngineCore.load(spec, device=Device(choose_device(device))))

    def chat(self, request: ChatRequest | Mapping[str, Any]) -> ChatCompletion:
        """Run one request to completion. Raises JobError."""
        request = ChatRequest.parse(request)
        sink = CollectingSink()
        chat = self.submit(request, sink)
        self._run(lambda: chat.done, [chat])
        return sink.completion()

    def stream(self, request: ChatRequest | Mapping[str, Any]) -> Iterator[ChatChunk]:
        """Run one request and yield its chunks as they are generated. Raises JobError, also while
        iterating."""
        request = ChatRequest.parse(request)
        sink = CollectingSink()
        yield from streamed(request, self.submit(request, sink), sink, self.step)

    def generate(
        self, prompts: SequenceOf[SequenceOf[int]], sampling: Sampling | SequenceOf[Sampling]
    ) -> list[Generation]:
        """Continue prompts of token ids; `sampling` is one for all or one per prompt. With n > 1
        the result has n entries per prompt, in order. Raises the JobError of the first that failed.
        """
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(samplings) != len(prompts):
            given = counted(len(prompts), "prompt"), counted(len(samplings), "sampling")
            raise invalid(f"got {' and '.join(given)}", "sampling")
        events: list[list[TokenEvent]] = []
        sequences: list[Sequence] = []
        for prompt, options in zip(prompts, samplings, strict=True):
            ids = self._ids(prompt)
            params = self._core.sampling_params(options, ids)
            for choice in range(params.n):
                events.append([])
                sequences.append(self._sequence(ids, params, choice, events[-1].append))
        self._core.add(sequences)
        self._run(lambda: all(sequence.ended for sequence in sequences), sequences)
        return [generation(of_one) for of_one in events]

    def generate_stream(self, prompt: SequenceOf[int], sampling: Sampling) -> Iterator[Token]:
        """Continue one prompt of token ids and yield its tokens (the first choice only)."""
        ids = self._ids(prompt)
        params = self._core.sampling_params(sampling, ids)
        events: deque[TokenEvent] = deque()
        sequence = self._sequence(ids, params, 0, events.append)
        self._core.add([sequence])
        try:
            while events or not sequence.ended:
                if not events:
                    self.step()
                    continue
                event = events.popleft()
                if event.error is not None:
                    raise event.error
                assert event.sampled is not None
                token = event.sampled
                yield Token(token.token_id, event.text, token.logprob, event.finish_reason)
        finally:
            sequence.cancel()

    def score(self, prompt: SequenceOf[int], target: SequenceOf[int]) -> list[float]:
        """Log-probability of each target token given the prompt and the targets before it.
        Raises JobError."""
        prompt_ids, target_ids = self._ids(prompt), self._ids(target, "target", minimum=0)
        if not target_ids:
            return []
        ids = [*prompt_ids, *target_ids]
        scores = PromptLogprobs(ids, 0, first=len(prompt_ids))
        self._read(ids[:-1], scores)
        return [one[0].logprob for one in scores.positions]

    def prompt_logits(self, prompt: SequenceOf[int]) -> Tensor:
        """Logits after each token of the prompt: float32 [len, vocab], on the CPU.
        Raises JobError."""
        ids = self._ids(prompt)
        logits = PromptLogits(len(ids))
        self._read(ids, logits)
        return cat(logits.rows)

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        """Token ids of the request's messages, rendered by the chat template. Raises JobError."""
        return self._core.prompts.build(request).token_ids

    def save_prompt_cache(
        self,
        prompt: SequenceOf[int] | SequenceOf[MessageInput],
        path: str | Path,
        **fields: Any,
    ) -> int:
        """Compute the state of a prompt and write it to a file, for `load_prompt_cache` of any
        engine with this model. `prompt`: token ids, or messages with which conversations begin;
        `fields`: of their requests, such as `tools`. Where others have the memory, it waits for
        them. Returns the number of tokens. Raises JobError.
        """
        self._core.require_open()
        if any(isinstance(one, Mapping | BaseModel) for one in prompt):
            messages = cast("SequenceOf[MessageInput]", prompt)
            ids = self._ids(prompt_caches.common_ids(self._core, messages, fields))
        else:
            ids = self._ids(cast("SequenceOf[int]", prompt))
        with self._state_of(ids) as state:
            write = prompt_caches.writer(self._core, state, Path(path))
        write()
        return len(ids)

    def load_prompt_cache(self, path: str | Path) -> int:
        """Load what `save_prompt_cache` wrote: every prompt that begins with it begins with this
        state from now on, whatever its `cache_salt`. Returns the number of tokens. Raises JobError.
        """
        self._core.require_open()
        state = prompt_caches.read_prompt_cache(self._core, Path(path))
        with self._lock, self._core.changing():
            prompt_caches.pin_prompt_cache(self._core, state, Path(path))
        return len(state.token_ids)

    def submit(self, request: ChatRequest, sink: Sink) -> ChatGeneration:
        """Queue a request without waiting; `sink` is told on the thread that steps that there are
        events. Raises JobError if the request can't run."""
        return start_chat(self._core, request, sink)

    def step(self) -> bool:
        """Advance all running sequences once. Returns False if there was nothing to run."""
        with self._lock:
            return self._core.step()

    def close(self) -> None:
        """Fail all sequences and free the device's memory."""
        with self._lock:
            self._core.close()

    def _run(self, done: Callable[[], bool], started: Iterable[Cancellable]) -> None:
        """Step until done; cancel what was started if the caller is interrupted."""
        try:
            while not done():
                self.step()
        finally:
            for one in started:
                one.cancel()

    def _read(self, ids: list[int], reader: PromptReader) -> None:
        """Compute a prompt in the batch and read its logits. Raises JobError."""
        if len(ids) > self.context_length:
            raise JobError(
                "context_length_exceeded",
                f"{len(ids)} tokens exceed the context of {self.context_length} tokens",
                "prompt",
            )
        events: list[TokenEvent] = []
        self._compute(Sequence(ids, listener=events.append, reader=reader), events)

    @contextmanager
    def _state_of(self, ids: list[int]) -> Iterator[PrefixState]:
        """A context in which no step is taken, with the state of a prompt. Raises JobError."""
        events: list[TokenEvent] = []
        sequence, saver = prompt_caches.saving(self._core, ids, events.append)
        try:
            self._compute(sequence, events)
            with self._lock, self._core.changing():
                yield prompt_caches.saved(self._core, saver)
        finally:
            with self._lock:
                saver.drop()

    def _compute(self, sequence: Sequence, events: SequenceOf[TokenEvent]) -> None:
        """Run a sequence that draws nothing to its end. Raises JobError."""
        self._core.add([sequence])
        self._run(lambda: sequence.ended, [sequence])
        if events[-1].error is not None:
            raise events[-1].error

    def _sequence(
        self, ids: list[int], params: SamplingParams, choice: int, listener: Listener
    ) -> Sequence:
        detokenizer = Detokenizer(self.tokenizer, skip_special=params.skip_special)
        return Sequence(ids, params, choice, detokenizer, listener)

    def _ids(self, values: SequenceOf[int], name: str = "prompt", *, minimum: int = 1) -> list[int]:
        self._core.require_open()
        ids = token_ids(values, self._core.vocab_size, name)
        if len(ids) < minimum:
            raise invalid(f"a {name} needs at least one token", name)
        return ids
