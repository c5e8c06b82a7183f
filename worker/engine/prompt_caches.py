"""Prompt caches: the state of a prompt, computed once, saved in a file and loaded by any engine of
the same model. A loaded one is pinned in the prefix store, for requests of all salts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jobs.api.params import MessageInput
from jobs.api.request import ChatRequest
from jobs.errors import JobError, invalid
from worker import device as devices
from worker.cache.book import CacheBook
from worker.cache.copies import Copy
from worker.cache.growth import FIRST_COLUMNS
from worker.cache.prefix_state import Adopt, PrefixState, pinnable
from worker.cache.prefix_store import BLOCK, StateRef
from worker.cache.session_states import SessionStates
from worker.cache.state_dir import StateDir
from worker.cache.state_file import Origin, StateFile, write_state
from worker.cache.state_saver import StateSaver
from worker.engine.engine import EngineCore
from worker.engine.runner import ModelRunner
from worker.engine.sequence import Listener, Sequence
from worker.engine.token_ids import token_ids

NEXT_TURNS = ("0", "x")  # two messages that begin differently
WAITING_SHARE = 4  # one of this many bytes of the cache limit may wait to be written, or to be used


def common_ids(
    core: EngineCore, messages: Iterable[MessageInput], fields: Mapping[str, Any]
) -> list[int]:
    """The tokens with which every conversation begins that begins with these messages. If the last
    one is the user's: those of the prompt that they make. Raises JobError."""
    given = [*messages]

    def ids(*more: MessageInput) -> list[int]:
        request = ChatRequest(**fields, model=core.info.name, messages=[*given, *more])
        return core.prompts.build(request).token_ids

    if given and _role(given[-1]) == "user":
        return ids()
    first, second = (ids({"role": "user", "content": text}) for text in NEXT_TURNS)
    pairs = enumerate(zip(first, second, strict=False))
    end = next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))
    return first[:end]


def _role(message: MessageInput) -> Any:
    return message.get("role") if isinstance(message, Mapping) else getattr(message, "role", None)


def saving(core: EngineCore, prompt: list[int], listener: Listener) -> tuple[Sequence, StateSaver]:
    """A sequence that computes a prompt alone, cut as with one sequence in the batch, whatever the
    engine's batch is; and what keeps its state. Raises JobError."""
    core.runner.require_one_rank()
    count = len(prompt)
    if count < BLOCK:
        raise invalid(f"a prompt cache needs at least {BLOCK} tokens, got {count}", "prompt")
    if count >= core.context_length:
        raise JobError(
            "context_length_exceeded",
            f"{count} tokens leave no room for more in the context of {core.context_length} tokens",
            "prompt",
        )
    saver = StateSaver(core.book, prompt, devices.limits(core.device).stride)
    return Sequence(prompt, listener=listener, saver=saver), saver


def saved(core: EngineCore, saver: StateSaver) -> PrefixState:
    """The state of a prompt that was computed. Must not run while the engine steps. Raises
    JobError."""
    state = saver.take(core.runner.copy_of)
    saver.drop()
    if state is None:
        raise JobError("out_of_memory", "there is no memory for the state of the prompt")
    return state


def writer(core: EngineCore, state: PrefixState, path: Path) -> Callable[[], None]:
    """Writes the state of a prompt, also while the engine steps or after its end. Raises JobError
    when it is called."""
    stride = devices.limits(core.device).stride  # see `saving`
    origin, layout = _origin(core, len(state.token_ids), stride), core.runner.pool.layout()

    def write() -> None:
        try:
            write_state(path, origin, layout, state)
        except OSError as error:
            raise invalid(f"{path} can't be written: {error.strerror}", "path") from None

    return write


def read_prompt_cache(core: EngineCore, path: Path) -> PrefixState:
    """The state in a file. Raises JobError with the difference if it is not one of this model."""
    core.runner.require_one_rank()
    if core.prefix.chain(1, "") is None:
        raise invalid("a prompt cache needs the prefix cache, which is off", "prompt_cache")
    file = StateFile.open(path)
    count = len(file.token_ids)
    _check_origin(file, _origin(core, count, core.prefix.stride))
    file.check(core.runner.pool.layout())
    try:
        token_ids(file.token_ids, core.vocab_size, "it")
    except JobError as error:
        raise invalid(f"{path} can't be used: {error.message}", "prompt_cache") from None
    if count >= core.context_length:
        raise invalid(
            f"{path} has {count} tokens, which leaves no room for more in the context of "
            f"{core.context_length} tokens",
            "prompt_cache",
        )
    state = file.read(core.runner.pool.layout(), core.device, count, file.ends)
    stride = core.prefix.stride
    usable = file.ends if state.snapshots else range(BLOCK, count + 1, BLOCK)
    if stride is not None and not any(end % stride == 0 for end in usable):
        raise invalid(
            f"{path} has {count} tokens: with --max-batch 1 state is reused in pieces of {stride} "
            "tokens only; leave it out, or give a larger --max-batch",
            "prompt_cache",
        )
    copies = (*state.blocks, *state.snapshots.values())
    if not all(bool(one.isfinite().all()) for copy in copies for one in copy.tensors):
        raise invalid(f"{path} holds values that are not finite: save it again", "prompt_cache")
    return state


def pin_prompt_cache(core: EngineCore, state: PrefixState, path: Path) -> None:
    """Keep the state of a prompt for as long as the engine. Must not run while the engine steps.
    Raises JobError if there is no room for it."""
    book, store, count = core.book, core.book.kept, len(state.token_ids)
    limit = book.limit_bytes
    root = core.prefix.chain(count, "")
    assert root is not None
    blocks = state.as_blocks(root)
    needed = sum(block.nbytes for key, block in blocks.items() if not store.pinned(key))
    least = book.bytes_for_one(min(core.context_length, count + FIRST_COLUMNS))
    if store.pinned_bytes + needed + least > limit:
        others = store.pinned_bytes / 2**20
        raise JobError(
            "out_of_memory",
            f"{path} does not fit: it has {needed / 2**20:.1f} MiB, other prompt caches have "
            f"{others:.1f} MiB, and a sequence that begins with it needs {least / 2**20:.1f} MiB, "
            f"of {limit / 2**20:.1f} MiB for the KV cache: leave it out, or shorten its prompt",
        )
    book.give_back(max(0, needed - book.bytes_beside + store.nbytes))
    if not store.shrink(book.bytes_beside - needed):
        raise JobError(
            "out_of_memory", f"{path} does not fit beside the sequences that run: load it later"
        )
    adopt = adopter(core.book, core.runner)
    store.pin({key: pinnable(block, adopt) for key, block in blocks.items()})
    store.touch([*blocks])


def adopter(book: CacheBook, runner: ModelRunner) -> Adopt:
    """Returns what numbers a copy that comes from a file, and gives it to the device."""

    def adopt(copy: Copy) -> StateRef:
        state = book.new_copy(copy.nbytes)
        runner.put(state, copy)
        return state

    return adopt


def keep_sessions(core: EngineCore, folder: Path, limit_bytes: int) -> None:
    """Write evicted state of sessions to a folder, and read it from there. Raises JobError."""
    core.runner.require_one_rank()
    book, runner, layout = core.book, core.runner, core.runner.pool.layout()

    def origin(prompt_length: int) -> Origin:
        return _origin(core, prompt_length, core.prefix.stride)

    core.prefix.sessions = SessionStates(
        StateDir(folder, limit_bytes, origin(1), layout, core.device, book.kept.pinned),
        core.prefix.matching,
        origin,
        book,
        runner,
        adopter(book, runner),
        core.device,
        book.limit_bytes // WAITING_SHARE,
    )


def _origin(core: EngineCore, prompt_length: int, stride: int | None) -> Origin:
    fingerprint, dtype, rotation = core.state_of(prompt_length)
    kinds = core.runner.pool.layout().kinds
    return Origin(core.info.name, fingerprint, dtype, kinds, rotation, stride)


def _check_origin(file: StateFile, mine: Origin) -> None:
    """Raise JobError with the difference if another model computed the state of a file."""
    its, where = file.origin, file.path
    if its.fingerprint != mine.fingerprint:
        raise invalid(
            f"{where} is of another model: {its.model} (fingerprint {its.fingerprint}), and this "
            f"is {mine.model} ({mine.fingerprint}); save it again with this model",
            "prompt_cache",
        )
    if its.dtype != mine.dtype:
        raise invalid(
            f"{where} is of another dtype: {its.dtype}, and the model runs in {mine.dtype} here; "
            "load the model with the same --dtype and --quantize, or save the file again",
            "prompt_cache",
        )
    if its.kinds != mine.kinds:
        raise invalid(
            f"{where} has other cache kinds than this model: {', '.join(its.kinds)}, and here "
            f"{', '.join(mine.kinds)}; save it again with this model",
            "prompt_cache",
        )
    if its.rotation != mine.rotation:
        raise invalid(
            f"{where} was computed for longer prompts, in which this model rotates all tokens "
            "differently: save the prompt again",
            "prompt_cache",
        )
    if mine.stride not in (None, its.stride):
        raise invalid(
            f"{where} was not computed in pieces of {mine.stride} tokens, as with --max-batch 1: "
            "save a prompt cache, or give a larger --max-batch",
            "prompt_cache",
        )
    if its.salt:
        raise invalid(
            f"{where} is state of a request with a cache_salt, which is not for all: save a "
            "prompt cache without one",
            "prompt_cache",
        )
