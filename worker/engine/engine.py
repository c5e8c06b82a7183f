"""The generation loop of one loaded model: sequences in, token events out."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch

from jobs.api.sampling import Sampling
from jobs.errors import JobError, failure_of
from worker import device as devices
from worker.backend import ModelInfo
from worker.cache.book import CacheBook
from worker.cache.pool import CachePool
from worker.cache.prefix_cache import PrefixCache
from worker.cache.sizes import CacheSizes
from worker.cache_memory import CacheShare, Holder
from worker.checkpoint.tokenizer import Tokenizer
from worker.constraints.constraint import Constraint
from worker.device import Device, Held, RankDevices, computing, threads_of
from worker.engine.activations import measure_once
from worker.engine.memory_meter import memory_meter
from worker.engine.parallel import load_on_ranks
from worker.engine.pipeline import Pipeline
from worker.engine.recovery import Changes, first_line, reason_of
from worker.engine.runner import Draw, ModelRunner, StorageError
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.slots import Slots
from worker.engine.speculation import make_speculation
from worker.loading.load import HostModels, LoadedModel, check_context, load, memory_named
from worker.model_spec import ModelSpec
from worker.processes.tuning import keep_memory
from worker.ranks.leader import Ranks, RanksLost
from worker.ranks.limits import place_ranks
from worker.sampling.bad_words import bad_word_ids
from worker.sampling.params import SamplingParams, resolve_params
from worker.sampling.sampler import draw
from worker.speculative.drafting import Drafting, drafting_of

logger = logging.getLogger(__name__)


class EngineCore:
    """Steps one model: schedule, forward, draw, commit. On a device that `overlaps`, the next step
    is launched before the last one is read and committed, if it does not depend on the result.

    One thread steps and closes, or its callers hold a lock for these. `add`, `cancel` of
    what was added, and the properties are safe from any thread.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        slots: Slots,
        context: int,
        share: CacheShare,
        prefix_cache: bool = True,
        drafting: Drafting | None = None,
        on_work: Callable[[], None] = lambda: None,
        draw: Draw = draw,
        ranks: Ranks | None = None,
    ) -> None:
        self.info: ModelInfo = loaded.info
        self.weight_bytes = self.info.weight_bytes + (drafting.weight_bytes if drafting else 0)
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.prompts = loaded.prompts(context)
        self.context_length = context
        self.vocab_size = loaded.model.vocab_size  # may be larger than the tokenizer's
        self.max_batch = slots.batch
        self.device = loaded.device
        place = RankDevices([loaded.device]) if ranks is None else ranks.devices
        self._parts = place.parts
        number = _slots_of_caches(slots)
        makers = loaded.model.make_caches, drafting.make_caches if drafting else list
        self.book = CacheBook(
            CacheSizes(*[make() for make in makers], ranks=place.ranks_each),
            max_slots=number,
            max_columns=context,
            share=share,
        )
        self.share = share
        # An engine that nobody has is freed at once.
        share.holder = cast(Holder, weakref.proxy(self))
        self.loaded, self.state_of = loaded, loaded.state_of
        self.draft = None if drafting is None else drafting.loaded
        limits = devices.limits(self.device)
        # A recurrent state that is kept must not have a token more than its sequence.
        overlaps = limits.overlaps and not self.book.sizes.needs_clearing
        stride = limits.stride if slots.batch == 1 else None
        self.prefix = PrefixCache(
            self.book,
            loaded.state_of if prefix_cache else None,
            stride,
            stride or 4 * limits.stride,  # a cut of prefill there costs little time
        )
        self.runner = ModelRunner(
            loaded.model,
            CachePool(*makers, slots=number, device=loaded.device),
            self.device,
            drafting.model if drafting else None,
            draw=draw,
            on_unsaved=self.prefix.reset,
            ranks=ranks,
        )
        self.speculation = make_speculation(
            drafting,
            self.book,
            self.runner.propose,
            limits.step_tokens,
            slots.batch,
            overlaps=overlaps,
        )
        self._scheduler = Scheduler(
            self.book,
            slots,
            limits.step_tokens,
            prefix_cache=self.prefix,
            speculation=self.speculation,
            not_finite=loaded.not_finite,
        )
        self._threads_of_rank = None if ranks is None else ranks.threads
        self._meter = memory_meter(self.device)
        self.peak_bytes = 0  # of memory in use, in one of its steps
        self._submitted: deque[Sequence] = deque()  # from any thread to the one that steps
        self._pipeline = Pipeline(self._scheduler, self.runner, overlaps=overlaps)
        self._changes = Changes(self._pipeline.reset)
        self._closed = self._freed = False
        self._close_lock = threading.Lock()  # held to submit, so that a closed engine takes nothing
        self._on_work = on_work  # called when there is something to step

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        *,
        device: Device,
        host: HostModels | None = None,
        interactive_slots: int | None = 0,
        preempt: bool = False,
        on_work: Callable[[], None] = lambda: None,
        draw: Draw = draw,
    ) -> EngineCore:
        """Load a model; `host` may have it. `interactive_slots`, `preempt`: see `Slots`; `draw`:
        see `ModelRunner`. Raises JobError."""
        place_ranks(spec, device)
        with computing(device.torch), memory_named(spec.reference, device):
            drafting = drafting_of(spec, device, host)
            if spec.tensor_parallel == 1:
                loaded, ranks = load(spec, device, host), None
            else:
                loaded, ranks = load_on_ranks(spec, device)
        try:
            if device.torch.type == "cpu":
                keep_memory()
            if spec.context is not None:
                check_context(spec.context, loaded)
            if device.budget is not None:
                measure_once(loaded, spec)
            batch = spec.max_batch
            batch = devices.limits(device.torch).max_batch if batch is None else batch
            context = spec.context or loaded.model.context_length
            slots = Slots.share(batch, interactive_slots, preempt)
            elsewhere = None if ranks is None else ranks.begin(_slots_of_caches(slots))
            caches = loaded.model.make_caches(), drafting.make_caches() if drafting else ()
            least = CacheSizes(*caches, ranks=device.ranks.ranks_each).least(context)
            return cls(
                loaded,
                slots=slots,
                context=context,
                share=device.share(spec.reference, least, spec.cache_bytes, elsewhere),
                prefix_cache=spec.prefix_cache,
                drafting=drafting,
                on_work=on_work,
                draw=draw,
                ranks=ranks,
            )
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise

    @property
    def steps(self) -> int:
        """Number of steps that the device was given."""
        return self._pipeline.launched

    @property
    def tokens_generated(self) -> int:
        return self._scheduler.tokens_generated

    @property
    def generations(self) -> int:
        """Number of sequences that have ended in the batch."""
        return self._scheduler.finish_rate.total

    @property
    def running(self) -> int:
        """Number of sequences in the batch."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Number of queued sequences, including those that no step has seen yet."""
        scheduler = self._scheduler
        return len(scheduler.waiting) + len(scheduler.saving) + len(self._submitted)

    def room(self, *, bulk: bool, bulk_coming: int, interactive_coming: int) -> int:
        """Number of further sequences that can be submitted now, see `Slots.room`; others are
        `coming` already."""
        scheduler, submitted = self._scheduler, tuple(self._submitted)
        bulk_all = scheduler.bulk + sum(sequence.bulk for sequence in submitted)
        return scheduler.slots.room(
            bulk=bulk,
            bulk_running=scheduler.bulk_running,
            bulk_all=bulk_all + bulk_coming,
            interactive=self.running + self.waiting - bulk_all + interactive_coming,
            ended=scheduler.finish_rate.recent,
        )

    @property
    def held(self) -> Held:
        """Implements `Owner`."""
        return Held(
            owner=self.info.name,
            weights=self.weight_bytes // self._parts,
            cache=self.book.bytes_held,
            cache_limit=self.book.limit_bytes,
            cache_least=self.share.least,
            threads=self._threads(),
        )

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences for the next step. Raises JobError if the engine is closed."""
        with self._close_lock:
            self.require_open()
            self._submitted.extend(sequences)
        self._on_work()

    @property
    def prefix_token_id(self) -> int | None:
        """The token before a text without a prompt."""
        return self.loaded.prefix_token_id

    def sampling_params(
        self,
        sampling: Sampling,
        prompt: SequenceOf[int],
        constraint: Constraint | None = None,
    ) -> SamplingParams:
        """Fill in the defaults of a prompt's sampling options. Raises JobError."""
        return resolve_params(
            sampling,
            self.loaded.defaults,
            prompt_length=len(prompt),
            context_length=self.context_length,
            vocab_size=self.vocab_size,
            bad_word_ids=bad_word_ids(self.tokenizer, sampling.bad_words or ()),
            special_stops=self._special_stops(sampling),
            constraint=constraint,
        )

    def _special_stops(self, sampling: Sampling) -> set[int]:
        """The special tokens whose texts are stop strings: the text of an answer leaves them out,
        so that nothing would stop there."""
        found = {self.tokenizer.id_of(text) for text in sampling.stop_strings}
        return {one for one in found if one is not None and self.tokenizer.is_special(one)}

    @torch.inference_mode()
    def step(self) -> bool:
        """Advance every scheduled sequence once. Returns False if there was nothing to run."""
        with self._computing(), self._changes.begin():
            try:
                self.runner.require_ranks()
                self._update_queue()
                self._add_fetched()
                self._meter.begin()
                step = self._pipeline.next()
                if step is None:
                    return False
                result = self.runner.read(step.result)
                peak = self._meter.peak()
                self.peak_bytes = max(self.peak_bytes, peak)
                self._scheduler.saw_memory(step.scheduled, peak)
                self._scheduler.commit(step.scheduled, result)
                self.book.leave_room()
                self.runner.apply(self.book.take_changes())
            except StorageError as error:
                self._free_caches(error)
            except RanksLost:
                raise
            except BaseException as error:  # one bad sequence must not fail the others
                self._recover(error)
        return True

    def evict(self, nbytes: int) -> int:
        """Drop up to so many bytes of kept state that no sequence uses, the least recently used
        first. Returns how many."""
        before = self.bytes_held
        self.give_back(nbytes)
        return before - self.bytes_held

    @property
    def bytes_held(self) -> int:
        """Implements `Holder`."""
        return self.book.bytes_held

    @property
    def bytes_needed(self) -> int:
        # Once it has stopped, nothing moves what is being written.
        return self.book.bytes_held if self._closed else self.book.bytes_needed

    def give_back(self, nbytes: int) -> None:
        with self.changing():
            self.book.give_back(nbytes)

    def trim(self) -> None:
        """Free the memory of the KV cache, unless a sequence uses it."""
        with self.changing():
            self.book.trim()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A context for what uses slots or changes kept state between steps. Raises JobError if the
        engine is closed."""
        self.require_open()
        with self._computing(), self._changes.begin():
            yield
            self._apply()

    @property
    def chat_obstacle(self) -> str | None:
        """The reason for which chat requests fail, with the remedy; None if the model has a chat
        template."""
        return self.loaded.chat_obstacle

    def require_open(self) -> None:
        """Raises JobError (cancelled) after `close`."""
        if self._closed:
            raise JobError("cancelled", "the engine was closed")

    def stop(self) -> None:
        """Fail all sequences, and begin to write the state of sessions. The memory stays taken
        until `close`, which waits for the disk; `wait_for_disk` may do that before, on another
        thread."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        try:
            self.share.forget()
            self._pipeline.forget()
            self._changes.settle()  # what is unknown is not written
            self.prefix.stop()
            self._update_queue()
            self._scheduler.fail_all(JobError("cancelled", "the engine was closed"))
            if self.prefix.sessions is not None:
                self._apply()  # all is where the book says
        except BaseException:
            if self.prefix.sessions is not None:
                self.prefix.sessions.abandon()
            raise
        if self.prefix.sessions is not None:
            self.prefix.sessions.stop()

    def wait_for_disk(self) -> None:
        """Wait until the state of sessions is written, after `stop`."""
        sessions = self.prefix.sessions  # which `close` forgets
        if sessions is not None:
            sessions.close()

    def close(self) -> None:
        """Fail all sequences and free the device's memory."""
        self.stop()
        if self._freed:
            return
        self._freed = True
        self.prefix.close()
        self.share.leave()
        self.prompts.close()
        self.speculation.close()
        self.book.close()
        self.runner.close()
        self._meter.close()
        self.draft = None
        del self.loaded, self.state_of
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _computing(self) -> AbstractContextManager[None]:
        return computing(self.device, self._threads())

    def _threads(self) -> int | None:
        return self._threads_of_rank or threads_of(self.info.weight_bytes)

    def _update_queue(self) -> None:
        """Queue what was submitted and remove what was cancelled since the last step."""
        while self._submitted:
            self._scheduler.add(self._submitted[0])
            self._submitted.popleft()  # after it: no interrupt may lose a sequence
        self._scheduler.remove_cancelled()

    def _add_fetched(self) -> None:
        """Keep the state of sessions that was read from files."""
        if self.prefix.sessions is not None:
            self.prefix.sessions.add_fetched()
            self.runner.apply(self.book.take_changes())

    def _apply(self) -> None:
        """Make the changes of the caches between two steps."""
        try:
            self.runner.apply(self.book.take_changes())
        except StorageError as error:  # which the caller may have no part in
            self._free_caches(error)

    def _free_caches(self, error: StorageError) -> None:
        """Compute all sequences anew, since the device lacks memory: in less storage, if it was for
        more than there was."""
        fact = first_line(error.__cause__ or error)
        if error.resize.shrinks:
            logger.warning("the KV cache can't shrink: %s; it is freed", fact)
        else:
            self.book.resize_failed(error.resize, fact)
            logger.warning("the KV cache can't grow: %s; it stays smaller until it is empty", fact)
        self._pipeline.forget()
        self._scheduler.isolate(self._scheduler.isolated, JobError("out_of_memory", fact))
        self.runner.apply(self.book.take_changes())

    def _recover(self, error: BaseException) -> None:
        """Run the sequences of a failed step one at a time; fail one that ran alone. Raises an
        interrupt, and an error of none of them."""
        failure = failure_of(error)  # raises an interrupt
        concerned = self._scheduler.concerned
        if not concerned:
            raise error
        self._pipeline.forget()
        self._scheduler.isolate(concerned, failure)
        self.runner.apply(self.book.take_changes())  # frees memory, which may be what was lacking
        if len(concerned) > 1:
            # A record with the error itself would keep the tensors of the step, with its traceback.
            fact = first_line(error)
            logger.warning("a step failed (%s); its sequences run again one at a time", fact)
            return
        (sequence,) = concerned
        sequence.fail(reason_of(error, sequence.length))
        self._scheduler.remove(sequence)


def _slots_of_caches(slots: Slots) -> int:
    return slots.batch + slots.paused + 1  # one for prompt caches
