"""The leader's side of a model on several ranks: tells the followers each step."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from jobs.errors import JobError
from worker.device import RankDevices
from worker.layers.shard import Shard
from worker.ranks.exchange import ExchangeBroken, RankExchange, new_memory
from worker.ranks.exchanges import EXCHANGES
from worker.ranks.messages import Begin, Connected, Failed, Part, Ready, Start
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

    `devices`: all of one kind. `cores`: of each rank on a CPU; empty: all have those
    of this process. Raises JobError if a process can't be started.
    """

    def __init__(
        self,
        part: Part,
        devices: RankDevices,
        cores: Sequence[frozenset[int]] = (),
    ) -> None:
        ranks, kind = len(devices), EXCHANGES[devices.first.type]
        self.ranks, self.devices, self.threads = ranks, devices, _threads(ranks, cores)
        self._channels: list[Connection] = []
        self._waiting = waiting = _Waiting()
        theirs = []
        try:
            with new_memory(kind.memory_bytes(ranks)) as memory:
                self._exchange = exchange = kind(memory, 0, ranks)
                for _ in range(1, ranks):
                    mine, other = socket.socketpair()
                    self._channels.append(Connection(mine.detach()))
                    theirs.append(other)
                self._watch = Watch(
                    theirs,
                    memory,
                    cores,
                    awaited=lambda: range(1, ranks) if waiting.now else exchange.awaited(),
                    at_end=exchange.end,
                    on_gpus=devices.first.type != "cpu",
                )
        except OSError as error:
            raise JobError("internal", f"a rank can't be started: {error}") from None
        self.shard = Shard(0, ranks, exchange)
        self._free = weakref.finalize(self, _free, self._channels, self._watch, exchange)
        for rank, channel in enumerate(self._channels, start=1):
            with self.together():
                channel.send(Start(part, devices[rank], rank, ranks, self.threads))

    @property
    def pids(self) -> list[int]:
        """The process ids of the followers."""
        return self._watch.pids

    def begin(self, slots: int) -> int:
        """Wait until the followers have read their parts, and connect. `slots`: of the caches.
        Returns the bytes that the follower with the least has free. Raises RanksLost."""
        free: list[int] = []
        with self.together():
            for reply in self.replies():
                assert isinstance(reply, Ready)
            self.send(Begin(slots))
            self._exchange.connect(self.devices.first)
            for reply in self.replies():
                assert isinstance(reply, Connected)
                free.append(reply.free_bytes)
        self._watch.computing = True
        return min(free)

    def send(self, message: Any) -> None:
        """To all followers."""
        for channel in self._channels:
            channel.send(message)

    def replies(self) -> list[Any]:
        """Of each follower the next message."""
        with self.waiting():
            found = [channel.recv() for channel in self._channels]
        for one in found:
            if isinstance(one, Failed):
                raise FollowerFailed(one.reason)
        return found

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which this rank waits for the others."""
        self._waiting.now = True
        try:
            yield
        finally:
            self._waiting.now = False

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
            self._exchange.require()
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
    """Whether the leader waits for the others elsewhere than in an exchange."""

    now = False


def _free(channels: Sequence[Connection], watch: Watch, exchange: RankExchange) -> None:
    for channel in channels:
        channel.close()
    exchange.end()
    watch.stop()


def _threads(ranks: int, cores: Sequence[frozenset[int]]) -> int:
    """The threads that each rank computes on."""
    if cores:
        return len(cores[0])
    return max(1, len(os.sched_getaffinity(0)) // ranks)
