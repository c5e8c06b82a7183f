"""A folder of state files: finds, reads and writes them, and limits their bytes.

The folder itself is the record: several workers may share one. A file is replaced by renaming, its
modification time says when it was used last, and damaged files are deleted.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

import torch

from jobs.errors import JobError, invalid
from jobs.sizes import size_texts
from worker.cache.block_keys import BlockKeys, root_key
from worker.cache.prefix_state import PrefixState
from worker.cache.prefix_store import BLOCK
from worker.cache.state_file import (
    PARTIAL,
    Damaged,
    Origin,
    StateFile,
    Unreadable,
    write_state,
)
from worker.cache.state_layout import StateLayout
from worker.device import is_out_of_memory

logger = logging.getLogger(__name__)

SUFFIX = ".state.safetensors"
NAME = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}")
ABANDONED_SECONDS = 600.0  # age at which a file that was never completed is deleted


@dataclass(frozen=True)
class Found:
    """The state of the first `end` tokens of a prompt, in a file."""

    file: StateFile
    changed: tuple[int, int]  # modification time in ns, and bytes
    end: int


@dataclass(frozen=True)
class _Entry:
    changed: tuple[int, int]
    file: StateFile | None  # None: of another model, or not readable by this version
    keys: list[bytes]


class StateDir:
    """The files of one model in a folder, and the limit in bytes of all of them. Thread-safe.

    `pinned`: whether a block is shared by all salts. `origin`: what computes the state, for any
    rotation and salt.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        origin: Origin,
        layout: StateLayout,
        device: torch.device,
        pinned: Callable[[bytes], bool],
    ) -> None:
        self.limit_bytes = limit_bytes
        self._folder, self._origin, self._layout = folder, origin, layout
        self._device, self._pinned = device, pinned
        self._entries: dict[str, _Entry] = {}
        self._by_key: dict[bytes, dict[str, StateFile]] = {}
        self._lock = threading.Lock()  # held to read and to change what is known of the folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / f".{uuid.uuid4().hex}{PARTIAL}"  # in containers, all have one pid
            with open(probe, "xb"):
                pass
            probe.unlink()
        except OSError as error:
            raise invalid(
                f"the state folder {folder} can't be written: {error.strerror}; give another one",
                "state_dir",
            ) from None
        self._make_room(limit_bytes)
        self._scan()

    def find(
        self, chain: BlockKeys, token_ids: Sequence[int], most: int, *, snapshots: bool, grid: int
    ) -> Found | None:
        """The longest state of at most `most` leading tokens, a multiple of `grid` of them or, if
        `grid` is BLOCK and there are `snapshots`, up to any snapshot."""
        keys = chain.keys[: most // BLOCK]
        with self._lock:
            for number in range(len(keys), 0, -1):
                for name, file in self._by_key.get(keys[number - 1], {}).items():
                    for end in _ends(file, number, snapshots=snapshots, grid=grid):
                        start = number * BLOCK
                        if end <= most and file.token_ids[start:end] == [*token_ids[start:end]]:
                            return Found(file, self._entries[name].changed, end)
        return None

    def read(self, found: Found) -> PrefixState | None:
        """The state that was found; None if it is gone, replaced, or damaged and then deleted, or
        if there is no memory for it."""
        file, end = found.file, found.end
        ends = [end] if end in file.ends else []
        try:
            file.check(self._layout)
            state = file.read(self._layout, self._device, end, ends)
        except JobError as error:
            if isinstance(error, Unreadable):
                logger.warning("%s", error.message)
            elif _changed(file.path) == found.changed:
                self._delete_damaged(file.path, error)
            with self._lock:
                self._forget(file.path.name)
            return None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("the state of a session can't be read: there is no memory for it")
            return None
        with suppress(OSError):
            os.utime(file.path)
        return state

    def write(self, name: str, origin: Origin, state: PrefixState, used_at: float) -> None:
        """Write a file, replacing one of that name, and delete the least recently used ones beyond
        the limit. A file that can't be written is given up, with a line in the log."""
        if state.nbytes > self.limit_bytes:
            logger.info(
                "the state of a session is given up: it has %s, and all files may have %s",
                *size_texts(state.nbytes, self.limit_bytes),
            )
            return
        path = self._folder / f"{name}{SUFFIX}"
        try:
            self._make_room(self.limit_bytes - state.nbytes, spare=path.name)
            write_state(path, origin, self._layout, state)
            os.utime(path, (used_at, used_at))
        except (OSError, MemoryError) as error:
            logger.warning("the state of a session can't be written to %s: %s", path, error)
        self._make_room(self.limit_bytes)
        self._scan()

    def _make_room(self, limit: int, spare: str = "") -> None:
        """Delete the least recently used files until the others have at most `limit` bytes."""
        files = [(name, stat) for name, stat in self._files() if name != spare]
        left = sum(stat.st_size for _, stat in files)
        for name, stat in sorted(files, key=lambda one: one[1].st_mtime_ns):
            if left <= limit:
                break
            with suppress(OSError):
                (self._folder / name).unlink()
            left -= stat.st_size

    def _scan(self) -> None:
        """Read the headers of files that are new or have changed."""
        files = dict(self._files())
        with self._lock:
            for name in self._entries.keys() - files.keys():
                self._forget(name)
            for name, stat in files.items():
                changed = (stat.st_mtime_ns, stat.st_size)
                known = self._entries.get(name)
                if known is None or known.changed != changed:
                    self._forget(name)
                    self._enter(name, changed)

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """The state files in the folder. Abandoned ones that never became complete are deleted."""
        try:
            entries = [*os.scandir(self._folder)]
        except OSError as error:
            logger.warning("the state folder %s can't be read: %s", self._folder, error)
            return
        for entry in entries:
            with suppress(OSError):  # another worker has deleted it
                stat = entry.stat()
                if not S_ISREG(stat.st_mode):
                    continue
                if NAME.fullmatch(entry.name):
                    yield entry.name, stat
                elif (
                    entry.name.startswith(".")
                    and entry.name.endswith(PARTIAL)
                    and time.time() - stat.st_mtime > ABANDONED_SECONDS
                ):
                    os.unlink(entry.path)

    def _enter(self, name: str, changed: tuple[int, int]) -> None:
        path = self._folder / name
        file, keys = None, []
        try:
            file = StateFile.open(path)
        except Damaged as error:
            self._delete_damaged(path, error)
            return
        except Unreadable as error:  # the next scan tries it again
            logger.warning("%s", error.message)
            return
        except JobError as error:
            logger.info("%s", error.message)
        if file is not None and self._is_ours(file.origin):
            origin = file.origin
            root = root_key(origin.fingerprint, origin.dtype, origin.rotation)
            chain = BlockKeys(root, origin.salt, self._pinned)
            keys = chain.extend(
                lambda start, end: file.token_ids[start:end], len(file.token_ids) // BLOCK
            )
            for key in keys:
                self._by_key.setdefault(key, {})[name] = file
        self._entries[name] = _Entry(changed, file, keys)

    def _forget(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        for key in entry.keys if entry else ():
            files = self._by_key[key]
            del files[name]
            if not files:
                del self._by_key[key]

    def _is_ours(self, origin: Origin) -> bool:
        mine = self._origin
        return (
            (origin.fingerprint, origin.dtype, origin.kinds)
            == (mine.fingerprint, mine.dtype, mine.kinds)
        ) and mine.stride in (None, origin.stride)

    def _delete_damaged(self, path: Path, error: JobError) -> None:
        fact = error.fact if isinstance(error, Damaged) else error.message
        logger.warning("deleted a damaged state file: %s: %s", path, fact)
        with suppress(OSError):
            path.unlink()


def _changed(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def _ends(file: StateFile, number: int, *, snapshots: bool, grid: int) -> list[int]:
    """The numbers of tokens that can be used of a file whose first `number` blocks alone are those
    of the prompt, longest first."""
    if not snapshots:
        end = number * BLOCK
        return [end] if end % grid == 0 else []
    return [
        end
        for end in reversed(file.ends)
        if end // BLOCK == number and (grid == BLOCK or end % grid == 0)
    ]
