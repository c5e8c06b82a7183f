"""Prefix caching: a sequence starts from the cached state of its longest known prefix.

Each sequence has a chain of keys, one per block of its tokens. When it is admitted, it begins with
the pages of the longest kept prefix of its chain. After each step of its prefill, and when it ends,
its own pages are kept as well: what is in a whole page does not change any more.

Layers that keep every position (full attention) can be cut at any block edge afterwards. All
others (sliding windows, recurrent states) exist only for the last token, so a model that has such
layers keeps snapshots of them at a few points: the last one in the prompt, those where prompts
part from each other, and the end of the sequence. Where the next prompt will part isn't known yet,
so a new prompt leaves provisional snapshots as well, at growing distances.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from worker.cache.block_keys import BlockKeys, root_key, salt_hash
from worker.cache.book import CacheBook
from worker.cache.changes import Retain, SaveSnapshot
from worker.cache.prefix_match import Hit, PrefixMatch
from worker.cache.prefix_store import BLOCK, Block, StateRef
from worker.cache.session_states import SessionStates
from worker.cache.snapshot_points import SnapshotPoints

COMPARED = 32  # sequences whose prompts are compared with a new one
PROVISIONAL_SHARE = 8  # one of this many bytes of the cache limit may hold provisional snapshots

StateOf = Callable[[int], tuple[object, ...]]


class Sequence(Protocol):
    """A sequence as the prefix cache knows it. The cache sets `computed` and `cached_tokens`."""

    prompt_ids: SequenceOf[int]
    computed: int  # leading tokens that are in its slot
    cached_tokens: int | None  # of the prompt; None: not admitted yet
    slot: int | None
    salt: str
    session: str | None

    @property
    def reusable(self) -> int:
        """Number of leading tokens that need not be computed if their state is known."""

    def next_count(self, budget: int) -> int:
        """Number of pending tokens that a step with room for `budget` tokens computes."""

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions [start, end)."""


@dataclass(eq=False, slots=True)
class Progress:
    """The block keys of one sequence, and the positions of its snapshots."""

    chain: BlockKeys
    points: SnapshotPoints = field(default_factory=SnapshotPoints)


class PrefixCache:
    """Decides what is kept and used. Belongs to the thread that steps the engine.

    `state_of(prompt length)` identifies what computes the state of such prompts; None: nothing is
    kept. Sequences share state if it and their salt are equal. `stride`: prefill is cut at
    multiples of it, whether or not state is kept, and state is only kept there. Each chunk then has
    the same shape with reuse as without, and so the same bits. `spacing`: tokens before the first
    provisional snapshot of a prompt.
    """

    def __init__(
        self,
        book: CacheBook,
        state_of: StateOf | None = None,
        stride: int | None = None,
        spacing: int = BLOCK,
    ) -> None:
        self.prompt_tokens = 0  # of all sequences that were admitted, each counted once
        self.cached_tokens = 0  # of these, how many were not computed
        self.stride, self.spacing = stride, spacing
        self.sessions: SessionStates | None = None  # keeps evicted state of sessions in files
        self._book, self._store = book, book.kept
        self._needs_snapshots = book.sizes.needs_snapshots
        self._state_of = state_of
        self._grid = stride or BLOCK
        assert self._grid % BLOCK == spacing % self._grid == 0
        self.matching = PrefixMatch(
            book.kept, self._needs_snapshots, self._grid, exact=stride is None
        )
        self._progress: dict[Sequence, Progress] = {}

    def count(self, sequence: Sequence, budget: int) -> int:
        """Number of pending tokens that a step computes: up to the next snapshot point."""
        count, start = sequence.next_count(budget), sequence.computed
        if self.stride is not None:
            count = min(count, self.stride - start % self.stride)
        progress = self._progress.get(sequence)
        point = None if progress is None else progress.points.after(start)
        return count if point is None else min(count, point - start)

    def waits(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """True if a running sequence computes a prefix of this one, and will have it no later than
        this one could. Running sequences are older, so they have the first claim on each step."""
        ahead = [one for one in running if one.computed < len(one.prompt_ids)]
        if self._state_of is None or not ahead:
            return False
        begin = self._match(sequence).end
        for other in ahead:
            end = self._promised(other, self._shared(sequence, other))
            if begin <= other.computed < end:
                return True
        return False

    def begin(self, sequence: Sequence, slot: int, budget: int, others: Iterable[Sequence]) -> int:
        """Reserve a slot for the first step of a sequence and write what is kept of its tokens.
        `others`: the sequences that come next. Returns the number of tokens to compute, 0 if there
        is no room."""
        hit = self._match(sequence)
        self._plan_points(sequence, hit.end, others)
        count = self._begin(sequence, slot, budget, hit)
        if not count and hit.end:  # the kept blocks take the room
            hit = Hit()
            count = self._begin(sequence, slot, budget, hit)
        if count and sequence.cached_tokens is None:
            sequence.cached_tokens = min(hit.end, len(sequence.prompt_ids))
            self.prompt_tokens += len(sequence.prompt_ids)
            self.cached_tokens += sequence.cached_tokens
        return count

    def keep(self, sequence: Sequence) -> None:
        """Keep what a running sequence has computed of its prompt."""
        if self._state_of is None:
            return
        path = self._keep(sequence, sequence.computed // self._grid * self._grid)
        points, end = self._progress[sequence].points, sequence.computed
        if end in points.ends:
            self._keep_snapshot(sequence, path, provisional=end in points.provisional)

    def end(self, sequence: Sequence, *, usable: bool = True) -> None:
        """Keep the state of a sequence that leaves its slot for good, or if it isn't usable drop
        what was kept of it."""
        try:
            if sequence in self._progress and sequence.slot is not None:
                if not usable:
                    self._store.drop(self._progress[sequence].chain.keys)
                else:
                    self._keep_end(sequence)
        finally:
            self._progress.pop(sequence, None)

    def chain(self, prompt_length: int, salt: str) -> BlockKeys | None:
        """The keys of such prompts; None: nothing is kept. May be called by any thread."""
        if self._state_of is None:
            return None
        root = root_key(*self._state_of(prompt_length))
        return BlockKeys(root, salt_hash(salt), self._store.pinned)

    def fetch(self, prompt_ids: list[int], salt: str | None) -> None:
        """Read what files hold of a prompt and the store doesn't. May be called by any thread, and
        takes time."""
        sessions, chain = self.sessions, self.chain(len(prompt_ids), salt or "")
        if sessions is not None and chain is not None:
            sessions.fetch(chain, prompt_ids)

    def reset(self) -> None:
        """Forget all sequences, and what was kept of them."""
        self._progress.clear()
        pinned = self._store.keep_pinned()
        numbers = {copy.number for copy in pinned} | self._book.saved
        self._book.emit(Retain(tuple(sorted(numbers))))

    def stop(self) -> None:
        """Keep nothing further."""
        self._state_of = None
        self._progress.clear()

    def close(self) -> None:
        """Keep nothing any more. State of sessions is in files then."""
        if self.sessions is not None:
            self.sessions.close()
            self.sessions = None
        self._store.clear()

    def _begin(self, sequence: Sequence, slot: int, budget: int, hit: Hit) -> int:
        sequence.computed = hit.end
        count = self.count(sequence, budget)
        with self._store.referenced(hit.keys) as blocks:
            if hit.end:
                found = self._book.begin_with(slot, blocks, hit.end + count)
            else:
                found = self._book.reserve(slot, count)
            if not found:
                sequence.computed = 0
                return 0
            if hit.end:
                self._store.touch(hit.keys)
                self._store.confirm(hit.keys[-1])
            else:
                self._book.begin(slot)
        return count

    def _match(self, sequence: Sequence) -> Hit:
        """The longest kept prefix that leaves a token to compute."""
        if self._state_of is None:
            return Hit()
        chain = self._chain(sequence)
        return self.matching.longest(chain, sequence.tokens, sequence.reusable)

    def _keep_end(self, sequence: Sequence) -> None:
        """Keep the state of a sequence at its end."""
        if self.stride is None:
            path = self._keep(sequence, sequence.computed)
            if self._needs_snapshots:
                path = self._keep_snapshot(sequence, path)
        else:  # generated tokens were computed in other shapes than those of a prompt
            path = self._keys(sequence, min(sequence.computed, len(sequence.prompt_ids)) // BLOCK)
            path = path[: self._store.known(path)]
        if self.sessions is not None and sequence.session is not None:
            chain = self._progress[sequence].chain
            token_ids = sequence.tokens(0, sequence.computed)
            self.sessions.ended(sequence.session, chain, path, token_ids, len(sequence.prompt_ids))

    def _keep(self, sequence: Sequence, end: int) -> list[bytes]:
        """Keep the blocks of the first `end` tokens. Returns their keys."""
        assert sequence.slot is not None
        keys = self._keys(sequence, end // BLOCK)
        known = self._store.known(keys)
        if new := keys[known:]:
            parents = [self._progress[sequence].chain.parent(known), *new]
            blocks: dict[bytes, Block[StateRef]] = {
                key: Block(parent, BLOCK) for key, parent in zip(new, parents, strict=False)
            }
            self._store.extend(blocks)
            self._book.keep_pages(sequence.slot, known, blocks.values())
        self._store.touch(keys)
        return keys

    def _keep_snapshot(
        self, sequence: Sequence, path: list[bytes], *, provisional: bool = False
    ) -> list[bytes]:
        """Keep the state of a sequence at its end, after the blocks of `path`. Returns the keys of
        all blocks up to there, or `path` if there is no room."""
        slot, end = sequence.slot, sequence.computed
        assert slot is not None
        start = len(path) * BLOCK
        assert start <= end < start + BLOCK
        if not start:
            return path
        tail = sequence.tokens(start, end)
        whole = [*path, self._progress[sequence].chain.key(len(path), tail)] if tail else path
        key = whole[-1]
        block = self._store.get(key)
        if block is not None and (block.snapshot is not None or self._store.pinned(key)):
            self._store.touch(whole)
            if not provisional:
                self._store.confirm(key)
            return whole
        sizes, emit = self._book.sizes, self._book.emit
        snapshot = self._book.new_copy(sizes.snapshot(end))
        needed = snapshot.nbytes
        share = self._book.limit_bytes // PROVISIONAL_SHARE
        with self._store.referenced(path):
            if provisional and not self._store.room_for_provisional(needed, share):
                return path
            if not self._store.shrink(self._book.room_for(needed) - needed):
                return path
            if tail:
                short: Block[StateRef] = Block(path[-1], len(tail))
                self._store.extend({key: short})
                self._book.keep_pages(slot, len(path), [short])
            emit(SaveSnapshot(slot, end, snapshot.number))
            self._store.attach(key, snapshot, provisional=provisional)
        self._store.touch(whole)
        return whole

    def _plan_points(self, sequence: Sequence, begin: int, others: Iterable[Sequence]) -> None:
        """Choose where snapshots of a prompt are kept: before its last token, where prompts part
        (that of an earlier sequence, of which only blocks are kept, or those of `others`), and
        provisional ones."""
        if self._state_of is None or not self._needs_snapshots:
            return
        keys = self._keys(sequence, len(sequence.prompt_ids) // BLOCK)
        last = (len(sequence.prompt_ids) - 1) // self._grid * self._grid
        shared = [
            self._shared(other, sequence)
            for other in islice(others, COMPARED)
            if other is not sequence
        ]
        shared = [end for end in shared if end // self._grid * self._grid > begin]
        parting = {self._store.known(keys) * BLOCK}
        if shared:
            parting |= {min(shared), max(shared)}
        self._progress[sequence].points = SnapshotPoints.plan(
            begin, last, parting, grid=self._grid, spacing=self.spacing
        )

    def _promised(self, sequence: Sequence, shared: int) -> int:
        """The last of its first `shared` tokens at which a running sequence will leave state."""
        if not self._needs_snapshots:
            return shared // self._grid * self._grid
        return self._progress[sequence].points.until(shared)

    def _shared(self, sequence: Sequence, other: Sequence) -> int:
        """Number of leading tokens in whole blocks that a sequence could take from the prompt of
        another."""
        mine = self._keys(sequence, sequence.reusable // BLOCK)
        theirs = self._keys(other, len(other.prompt_ids) // BLOCK)
        blocks = range(min(len(mine), len(theirs)))
        return BLOCK * bisect_left(blocks, True, key=lambda at: mine[at] != theirs[at])

    def _keys(self, sequence: Sequence, blocks: int) -> list[bytes]:
        """The keys of a sequence's first blocks."""
        return self._chain(sequence).extend(sequence.tokens, blocks)

    def _chain(self, sequence: Sequence) -> BlockKeys:
        progress = self._progress.get(sequence)
        if progress is None:
            chain = self.chain(len(sequence.prompt_ids), sequence.salt)
            assert chain is not None
            progress = self._progress[sequence] = Progress(chain)
        return progress.chain
