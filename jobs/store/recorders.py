"""Recorders that are processes of their own: the status that each publishes in Redis.

A recorder inside a worker is part of the worker's status. worker_status.py reads both.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

import redis

from jobs import keys, lua

REPORT = lua.load("jobs.store", "report_recorder")
STATUS_SECONDS = 15.0  # a status that is older is that of a recorder that is gone


# KEYS and ARGV of report_recorder.lua, by name and in order.


class RecorderKeys(NamedTuple):
    recorders: str
    status: str


class RecorderArgs(NamedTuple):
    name: str
    about: str
    milliseconds: int


class RecorderPresence:
    """One recorder process, listed from its first report until `leave`, or for STATUS_SECONDS."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._redis, self._name = client, name
        self._report = client.register_script(REPORT)
        self._process = {
            "name": name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_at": time.time(),
        }

    def report(self, results: Mapping[str, str]) -> None:
        """Publish the status. `results`: the folder, and why rows can't be written to it now.
        Raises redis.RedisError."""
        self._report(
            keys=RecorderKeys(keys.RECORDERS, keys.recorder(self._name)),
            args=RecorderArgs(
                name=self._name,
                about=json.dumps({**self._process, "results": dict(results)}),
                milliseconds=int(1000 * STATUS_SECONDS),
            ),
        )

    def leave(self) -> None:
        """Remove the status. Raises redis.RedisError."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.delete(keys.recorder(self._name))
        pipeline.zrem(keys.RECORDERS, self._name)
        pipeline.execute()
