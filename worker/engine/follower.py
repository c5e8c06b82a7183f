"""A process that computes one rank of a model after its leader: it draws no tokens, and knows no
Redis and no files but the weights and what this machine's kernels need."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from worker.cache.pool import CachePool
from worker.device import free_bytes
from worker.engine.runner import ModelRunner, StorageError
from worker.layers.shard import Shard
from worker.loading.find import find
from worker.loading.load import build_model
from worker.models.model import Model, Placement
from worker.processes.tuning import tune
from worker.ranks.exchange import ExchangeBroken
from worker.ranks.exchanges import EXCHANGES
from worker.ranks.messages import (
    Begin,
    Change,
    Changed,
    Compute,
    Connected,
    Failed,
    Follow,
    Part,
    Ready,
    Start,
)

PR_SET_PDEATHSIG = 1  # of prctl


def main(arguments: Sequence[str]) -> None:
    """`arguments`: the descriptors of the socket to the leader and of the shared memory, and the
    leader's process id."""
    channel, memory, leader = Connection(int(arguments[0])), *map(int, arguments[1:])
    _end_with(leader)
    try:
        _follow(channel, memory)
    except EOFError:  # the leader has closed the socket
        _leave(0)
    except ExchangeBroken as error:  # the leader finds out who it was
        if error.__cause__ is not None:
            print(f"an exchange of ranks failed: {error}", file=sys.stderr)
        _leave(1)
    except Exception as error:
        _say_why(channel, error)
        _leave(1)


def _follow(channel: Connection, memory: int) -> None:
    start = channel.recv()
    assert isinstance(start, Start)
    tune()
    torch.set_num_threads(start.threads)
    device = start.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    exchange = EXCHANGES[device.type](memory, start.rank, start.ranks)
    shard = Shard(start.rank, start.ranks, exchange)
    model = _read(start.part, device, shard)
    channel.send(Ready())
    begin = channel.recv()
    assert isinstance(begin, Begin)
    exchange.connect(device)
    channel.send(Connected(free_bytes(device)))
    pool = CachePool(model.make_caches, slots=begin.slots, device=device)
    runner = ModelRunner(model, pool, device, shard=shard)
    with torch.inference_mode():
        while True:
            message = channel.recv()
            if isinstance(message, Compute):
                runner.compute(message.spans)
            elif isinstance(message, Follow):
                runner.advance(message.following)
            else:
                assert isinstance(message, Change)
                channel.send(_changed(runner, message))


def _read(part: Part, device: torch.device, shard: Shard) -> Model:
    source = find(str(part.path))
    place = Placement(part.dtype, device, shard=shard)
    with source.weights() as checkpoint:
        return build_model(source.config, part.tied, place, checkpoint)


def _changed(runner: ModelRunner, message: Change) -> Changed:
    try:
        return Changed(unsaved=runner.change(message.changes))
    except StorageError as error:
        return Changed(lacking=error.resize, fact=str(error.__cause__))


def _end_with(leader: int) -> None:
    """Let the system kill this process when the thread of the leader ends that has started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader:  # it has ended already
        raise SystemExit(1)


def _say_why(channel: Connection, error: Exception) -> None:
    reason = f"{type(error).__name__}: {error}"
    try:
        channel.send(Failed(reason))
    except OSError:  # the leader is gone
        print(reason, file=sys.stderr)


def _leave(status: int) -> None:
    """End the process at once: destructors of NCCL may wait for ranks that are gone."""
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
