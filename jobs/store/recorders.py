"""Recorders that are processes of their own: the status that each publishes in Redis.

A recorder inside a worker is part of the worker's status. worker_status.py reads both.
"""

from __future__ import annotations

import os
import socket
import time
from typing import NamedTuple

import redis

from jobs import keys, lua
from jobs.store.worker_status import RECORDER, ProcessStatus, ResultsStatus

REPORT = lua.load("jobs.store", "report_recorder")
STATUS_SECONDS = 15.0  # a status that is older is that of a recorder that is gone


# KEYS and ARGV of report_recorder.lua, by name and in order.


class RecorderKeys(NamedTuple):
    recorders: str
    status: str


class RecorderArgs(NamedTuple):
    name: str
    about: bytes
    milliseconds: int


class RecorderPresence:
    """One recorder process, listed from its first report until `leave`, or for STATUS_SECONDS."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._redis, self._name = client, name
        self._report = client.register_script(REPORT)
        self._process: ProcessStatus = {
            "name": name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._started_at = time.time()

    def report(self, results: ResultsStatus) -> None:
        """Publish the status. `results`: the folder, and why rows can't be written to it now.
        Raises redis.RedisError."""
        self._report(
            keys=RecorderKeys(keys.RECORDERS, keys.recorder(self._name)),
            args=RecorderArgs(
                name=self._name,
                about=RECORDER.encode(
                    {**self._process, "started_at": self._started_at, "results": results}
                ),
                milliseconds=int(1000 * STATUS_SECONDS),
            ),
        )

    def leave(self) -> None:
        """Remove the status. Raises redis.RedisError."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.delete(keys.recorder(self._name))
        pipeline.zrem(keys.RECORDERS, self._name)
        pipeline.execute()
