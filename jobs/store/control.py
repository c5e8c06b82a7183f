"""Commands to the worker over pub/sub: of producers to all workers, of operators to this one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import redis

from jobs import keys
from jobs.store.operator import OperatorCommand


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a job, if this worker runs it."""

    job: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Stop the worker."""


class Control:
    """A subscription to the channel of all workers, on which producers cancel jobs, and to the
    worker's own RQ channel, which is for operators: only there RQ's command shutdown ends it, and
    only there it takes an OperatorCommand."""

    def __init__(self, client: redis.Redis, channel: str) -> None:
        self._pubsub = client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        self._own = channel

    def subscribe(self) -> None:
        self._pubsub.subscribe(keys.CONTROL, self._own)

    def commands(self) -> Iterator[Cancel | Shutdown | OperatorCommand]:
        """The commands that have arrived; messages of any other form are skipped."""
        while (message := self._pubsub.get_message()) is not None:
            try:
                content = json.loads(message["data"])
                job = content.get("job") or content.get("job_id")
                command = content.get("op") or content.get("command")
            except (ValueError, RecursionError, AttributeError, TypeError):
                continue
            if command in ("cancel", "stop-job") and isinstance(job, str):
                yield Cancel(job)
            elif message["channel"] != self._own.encode():
                continue
            elif command == "shutdown":
                yield Shutdown()
            elif (found := OperatorCommand.read(content)) is not None:
                yield found

    def close(self) -> None:
        self._pubsub.close()
