"""An operator's command to one worker, and the worker's answers.

The command is a message on the channel on which RQ's own commands come (rq:pubsub:<worker>), in
RQ's form, since producers may not publish there. The answers are a list in Redis, so that none is
lost with a connection. `send` and `Call` are for operators, `Answers` is for workers.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import redis
from rq.command import PUBSUB_CHANNEL_TEMPLATE

from jobs import keys
from jobs.errors import JobError
from jobs.store.worker_status import read_statuses

ANSWERS_SECONDS = 600  # how long the answers are kept after the last one
FIRST_ANSWER_SECONDS = 20.0  # that a busy worker may take to say that it has the command
POLL_SECONDS = 1.0  # between two looks at whether the worker is alive


@dataclass(frozen=True, slots=True)
class OperatorCommand:
    """A command as a worker receives it. `args` may hold anything: the handler checks them."""

    name: str
    id: str
    args: Mapping[str, Any]

    @classmethod
    def read(cls, content: Any) -> OperatorCommand | None:
        """The command of a message; None for a message of another form."""
        match content:
            case {"command": str(name), "id": str(found), "args": dict(args)}:
                return cls(name, found, args) if keys.JOB_ID.fullmatch(found) else None
        return None


class Answer(NamedTuple):
    """One answer to a command. The first one, without facts, says that the worker has it; the last
    one is `final` or has an error."""

    facts: Mapping[str, Any]
    final: bool = False
    error: JobError | None = None

    @property
    def ended(self) -> bool:
        return self.final or self.error is not None

    def encode(self) -> str:
        error = None if self.error is None else self.error.to_dict()
        return json.dumps({"facts": self.facts, "final": self.final, "error": error})

    @classmethod
    def decode(cls, text: bytes) -> Answer | None:
        """None for what no worker has written."""
        try:
            content = json.loads(text)
        except ValueError:
            return None
        match content:
            case {"facts": dict(facts), "final": bool(final), "error": None}:
                return cls(facts, final)
            case {"facts": dict(facts), "final": bool(final), "error": {"code": str()} as error}:
                return cls(facts, final, JobError.from_dict(error))
        return None


class Answers:
    """The answers of a worker, as it sends them."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis: Any = client

    def send(self, command_id: str, answers: Sequence[Answer]) -> None:
        """Add answers to a command. Raises redis.RedisError."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.rpush(keys.answers(command_id), *(one.encode() for one in answers))
        pipeline.expire(keys.answers(command_id), ANSWERS_SECONDS)
        pipeline.execute()


class Call:
    """A command that was sent to a worker, and the answers to it."""

    def __init__(self, client: redis.Redis, worker: str, command_id: str) -> None:
        self._redis: Any = client
        self.worker, self._id = worker, command_id
        self._sent_at = time.monotonic()

    def answers(self, timeout: float | None = None) -> Iterator[Answer]:
        """The answers as they come, up to the last one. Raises its error, JobError if the worker is
        gone, if it does not answer, or if the last answer has not come within `timeout` seconds
        after the command, and redis.RedisError."""
        heard = False
        while True:
            found = self._redis.blpop([keys.answers(self._id)], timeout=POLL_SECONDS)
            if found is not None:
                if (answer := Answer.decode(found[1])) is None:
                    continue
                heard = True
                if answer.error is not None:
                    raise answer.error
                if answer.facts or answer.final:
                    yield answer
                if answer.final:
                    return
                continue
            waited = time.monotonic() - self._sent_at
            if not self._is_alive():
                raise JobError(
                    "worker_lost",
                    f"worker {self.worker} is gone: it has not answered this command",
                )
            if not heard and waited >= FIRST_ANSWER_SECONDS:
                raise JobError(
                    "timeout",
                    f"worker {self.worker} does not answer: it hangs, or its version is older than "
                    "this command",
                )
            if timeout is not None and waited >= timeout:
                raise JobError(
                    "timeout", f"worker {self.worker} has not done it within {timeout:g} s"
                )

    def result(self, timeout: float | None = None) -> Mapping[str, Any]:
        """The facts of the last answer. Raises as `answers`."""
        return [answer.facts for answer in self.answers(timeout)][-1]

    def _is_alive(self) -> bool:
        """True if the worker holds its lease, which a thread of its own renews."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.zscore(keys.WORKERS, self.worker)
        pipeline.time()
        lease, (seconds, _) = pipeline.execute()
        return lease is not None and lease >= seconds * 1000


def send(client: redis.Redis, worker: str, command: str, args: Mapping[str, Any]) -> Call:
    """Send a command to a worker. Raises JobError if nobody receives it, and redis.RedisError, also
    if the user may not command workers."""
    call = Call(client, worker, uuid.uuid4().hex)
    message = {"command": command, "id": call._id, "args": args}
    channel = PUBSUB_CHANNEL_TEMPLATE % worker
    redis_client: Any = client
    if not redis_client.publish(channel, json.dumps(message)):
        raise _not_received(client, worker)
    return call


def _not_received(client: redis.Redis, worker: str) -> JobError:
    if any(one["name"] == worker for one in read_statuses(client).loading):
        reason = "still loads its models: try again when it serves them"
        return JobError("unavailable", f"worker {worker} {reason}")
    return JobError(
        "not_found", f"no worker {worker} is running: chatjobs status lists those that are"
    )
