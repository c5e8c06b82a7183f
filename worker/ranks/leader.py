"""The leader's side of a model on several ranks: tells the followers each step."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jobs.errors import JobError
from worker.layers.shard import Shard
from worker.ranks.gloo import ExchangeBroken, GlooExchange
from worker.ranks.messages import Connect, Failed, Part, Ready, Start
from worker.ranks.watch import Watch

REASON_SECONDS = 5.0  # that the reason of a loss may take to be known


class RanksLost(JobError):
    """A rank has failed, so that none of them goes on: the model must be loaded anew."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "internal",
            f"{reason}: a model on several ranks ends with any of them; load it again",
        )


class FollowerFailed(Exception):
    """What a follower says before it ends."""


class Ranks:
    """The followers of one model, whose leader is this process. Belongs to the thread that steps
    the engine. Freed like any object, and by `close`; the followers end with it.

    `cores`: of each rank; empty: all ranks have those of this process. Raises JobError if a process
    can't be started.
    """

    def __init__(self, part: Part, ranks: int, cores: Sequence[frozenset[int]] = ()) -> None:
        self.ranks, self.threads = ranks, _threads(ranks, cores)
        self._exchange = exchange = GlooExchange(0, ranks)
        self.shard = Shard(0, ranks, exchange)
        self._channels: list[Connection] = []
        theirs = []
        for _ in range(1, ranks):
            mine, other = socket.socketpair()
            self._channels.append(Connection(mine.detach()))
            theirs.append(other)
        folder = Path(tempfile.mkdtemp(prefix="chatjobs-ranks-"))
        self._meeting = folder / "meeting"
        self._waiting = waiting = _Waiting()
        try:
            self._watch = Watch(theirs, cores, lambda: exchange.waits or waiting.now)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise JobError("internal", f"a rank can't be started: {error}") from None
        self._free = weakref.finalize(self, _free, self._channels, self._watch, folder)
        for rank, channel in enumerate(self._channels, start=1):
            with self.together():
                channel.send(Start(part, rank, ranks, self.threads, self._meeting))

    @property
    def pids(self) -> list[int]:
        """The process ids of the followers."""
        return self._watch.pids

    def connect(self, slots: int) -> None:
        """Wait until the followers have read their parts, and join them. `slots`: of the caches.
        Raises RanksLost."""
        with self.together():
            for reply in self.replies():
                assert isinstance(reply, Ready)
            self.send(Connect(slots))
            self._exchange.connect(self._meeting)
        self._watch.computing = True

    def send(self, message: Any) -> None:
        """To all followers."""
        for channel in self._channels:
            channel.send(message)

    def replies(self) -> list[Any]:
        """Of each follower the next message."""
        self._waiting.now = True
        try:
            found = [channel.recv() for channel in self._channels]
        finally:
            self._waiting.now = False
        for one in found:
            if isinstance(one, Failed):
                raise FollowerFailed(one.reason)
        return found

    def require(self) -> None:
        """Raises RanksLost if the followers have ended."""
        if self._watch.lost is not None:
            raise RanksLost(self._watch.lost)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context for what all ranks do. If it fails here or there, the ranks are no longer in
        step, and all followers end. Raises RanksLost."""
        self.require()
        try:
            yield
        except Exception as error:
            reason = self._reason(error)
            self._lose(reason)
            raise RanksLost(reason) from error
        except BaseException:  # an interrupt
            self._lose("work of the ranks was interrupted")
            raise

    def close(self) -> None:
        """End the followers."""
        self._free()
        self._exchange.close()

    def _lose(self, reason: str) -> None:
        self._watch.lost = self._watch.lost or reason
        self._watch.stop(seconds=0)
        self._free()

    def _reason(self, error: Exception) -> str:
        """Why work of the ranks has failed: what a follower says, what has become of it, or what
        failed here."""
        if isinstance(error, FollowerFailed):
            return str(error)
        if isinstance(error, ExchangeBroken | OSError | EOFError):  # as if the others were gone
            self._watch.ended.wait(REASON_SECONDS)
        for channel in self._channels:
            with suppress(OSError, EOFError):
                while channel.poll(0):
                    message = channel.recv()
                    if isinstance(message, Failed):
                        return message.reason
        return self._watch.lost or f"rank 0 failed ({type(error).__name__}: {error})"


class _Waiting:
    """Whether the leader waits for a message."""

    now = False


def _free(channels: Sequence[Connection], watch: Watch, folder: Path) -> None:
    for channel in channels:
        channel.close()
    watch.stop()
    shutil.rmtree(folder, ignore_errors=True)


def _threads(ranks: int, cores: Sequence[frozenset[int]]) -> int:
    """The threads that each rank computes on."""
    if cores:
        return len(cores[0])
    return max(1, len(os.sched_getaffinity(0)) // ranks)
