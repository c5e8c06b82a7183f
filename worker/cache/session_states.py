"""State of sessions beyond memory: written to files when it is evicted, and read back.

The engine's thread never waits for the disk. It hands evicted state, which it only references, to
a thread that writes. When the engine has stopped, that thread takes what is left, one state after
the other. What was read on the thread that prepares prompts waits until the engine's thread adds it
to the store.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from worker.cache.block_keys import BlockKeys
from worker.cache.book import CacheBook
from worker.cache.prefix_match import PrefixMatch
from worker.cache.prefix_state import Adopt, PrefixState, Tensors, add, take
from worker.cache.prefix_store import BLOCK
from worker.cache.state_dir import StateDir
from worker.cache.state_file import Origin
from worker.device import computing, is_out_of_memory

logger = logging.getLogger(__name__)

LEAST_TOKENS = 64  # that a file must save a prompt


@dataclass(frozen=True, slots=True)
class _Ended:
    """The last turn of a session that has ended here."""

    name: str  # of its file
    path: Sequence[bytes]
    token_ids: Sequence[int]
    origin: Origin
    ended_at: float  # seconds since the epoch


Write = tuple[str, Origin, PrefixState, float]


class SessionStates:
    """`origin_of(prompt length)`: what computes the state of such prompts. `tensors`: of what the
    book keeps; `adopt`: gives it others. `waiting_bytes`: the limit of state that waits to be
    written, and of state that was read and waits to be used; beyond it state is given up."""

    def __init__(
        self,
        folder: StateDir,
        matching: PrefixMatch,
        origin_of: Callable[[int], Origin],
        book: CacheBook,
        tensors: Tensors,
        adopt: Adopt,
        device: torch.device,
        waiting_bytes: int,
    ) -> None:
        self._folder, self._matching = folder, matching
        self._store = matching.store
        self._origin_of, self._book = origin_of, book
        self._tensors, self._adopt = tensors, adopt
        self._device, self._limit = device, waiting_bytes
        self._ended: dict[bytes, _Ended] = {}  # by the last key of its path, oldest first
        self._last: dict[str, bytes] = {}  # that key, by the name of the file
        self._fetched: deque[tuple[PrefixState, BlockKeys]] = deque()
        self._writes: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._bytes = 0  # waiting to be written
        self._lock = threading.Lock()  # held to change it
        self._store.on_evict = self._evicted
        self._thread = threading.Thread(target=self._write_all, name="session states", daemon=True)
        self._thread.start()

    def ended(
        self,
        session: str,
        chain: BlockKeys,
        path: Sequence[bytes],
        token_ids: Sequence[int],
        prompt_length: int,
    ) -> None:
        """A turn has ended and left its state in the blocks of `path`."""
        if len(path) * BLOCK < LEAST_TOKENS or all(map(self._store.pinned, path)):
            return
        facts = f"{session}\n{chain.salt}".encode("utf-8", "surrogatepass")
        name = hashlib.blake2b(facts, key=chain.root, digest_size=32).hexdigest()
        origin = replace(self._origin_of(prompt_length), salt=chain.salt)
        self._forget(name)
        if (same := self._ended.pop(path[-1], None)) is not None:  # a session with the same text
            self._last.pop(same.name)
        self._ended[path[-1]] = _Ended(name, path, token_ids, origin, time.time())
        self._last[name] = path[-1]

    def fetch(self, chain: BlockKeys, prompt_ids: list[int]) -> None:
        """Read what a file holds of a prompt and the store doesn't. Called by other threads."""
        most = len(prompt_ids) - 1
        known = self._matching.longest(chain, lambda a, b: prompt_ids[a:b], most).end
        found = self._folder.find(
            chain,
            prompt_ids,
            most,
            snapshots=self._matching.snapshots,
            grid=self._matching.grid,
        )
        if found is None or found.end - known < LEAST_TOKENS:
            return
        waiting = sum(state.nbytes for state, _ in [*self._fetched])
        nbytes = found.changed[1]
        if waiting + nbytes > self._limit:
            return
        state = self._folder.read(found)
        if state is not None:
            self._fetched.append((state, chain))

    def add_fetched(self) -> None:
        """Add to the store what was read."""
        while self._fetched:
            state, chain = self._fetched.popleft()
            add(self._book, self._adopt, state, chain)

    def stop(self) -> None:
        """Have the thread write the state of all sessions, those of the newest turns first, and end
        then. Until `close`, nothing may change what is kept."""
        self._store.on_evict = lambda key: None
        self._writes.put(None)

    def abandon(self) -> None:
        """As `stop`, but write nothing further: the storage may not be as the book says."""
        self._ended.clear()
        self.stop()

    def close(self) -> None:
        """Wait until all is written. May be called by any thread, after `stop`."""
        self._thread.join()

    def _evicted(self, key: bytes) -> None:
        ended = self._ended.get(key)
        if ended is None:
            return
        self._forget(ended.name)
        state = self._take(ended)
        if state is None:
            return
        with self._lock:
            full = self._bytes + state.nbytes > self._limit
            self._bytes += 0 if full else state.nbytes
        if full:
            logger.info("the state of a session is given up: others still wait for the disk")
        else:
            self._writes.put((ended.name, ended.origin, state, ended.ended_at))

    def _take(self, ended: _Ended) -> PrefixState | None:
        """The state of a session; None if it is gone, or if there is no memory for a copy."""
        needs = self._matching.snapshots
        try:
            return take(self._store, self._tensors, ended.path, ended.token_ids, snapshots=needs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        logger.warning("the state of a session is given up: there is no memory to copy it")
        return None

    def _forget(self, name: str) -> None:
        key = self._last.pop(name, None)
        ended = None if key is None else self._ended.get(key)
        if key is not None and ended is not None and ended.name == name:
            del self._ended[key]

    def _write_all(self) -> None:
        while (write := self._writes.get()) is not None:
            self._write(write)
            del write  # the thread would hold it while it waits
        left = self._folder.limit_bytes
        with computing(self._device, threads=1):
            for ended in reversed([*self._ended.values()]):
                left -= self._write_left(ended, left)

    def _write_left(self, ended: _Ended, most: int) -> int:
        """Write the state of a session if it has at most so many bytes. Returns its bytes, 0 if it
        has more. The next one is copied when this one is written: they are never in memory
        together."""
        try:
            state = self._take(ended)
        except Exception:  # a defect; the others can be written
            logger.exception("the state of a session can't be copied")
            return 0
        if state is None or state.nbytes > most:
            return 0
        with self._lock:
            self._bytes += state.nbytes
        self._write((ended.name, ended.origin, state, ended.ended_at))
        return state.nbytes

    def _write(self, write: Write) -> None:
        name, origin, state, used_at = write
        try:
            self._folder.write(name, origin, state, used_at)
        except Exception:  # a defect; without this thread, state would wait for ever
            logger.exception("the state of a session can't be written")
        with self._lock:
            self._bytes -= state.nbytes
