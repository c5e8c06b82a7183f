"""An operator's command to one worker, and the worker's answers.

The command is a message on the channel on which RQ's own commands come (rq:pubsub:<worker>), in
RQ's form, since producers may not publish there. The answers are a list in Redis, so that none is
lost with a connection. While Redis takes no writes, no command is sent, and once one is sent, an
outage of Redis is waited through. `send` and `Call` are for operators, `Answers` is for workers.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import redis
from rq.command import PUBSUB_CHANNEL_TEMPLATE

from jobs import keys, lua
from jobs.errors import JobError
from jobs.store.connection.connect import may_pass, redis_failure
from jobs.store.worker_status import read_statuses

ANSWER = lua.load("jobs.store", "answer")

ANSWERS_SECONDS = 600  # how long the answers are kept after the last one
FIRST_ANSWER_SECONDS = 20.0  # that a busy worker may take to say that it has the command
POLL_SECONDS = 1.0  # between two looks at whether the worker is alive
# After an outage a worker may take so long to subscribe again, to renew its lease and to answer.
RETURN_SECONDS = 6.0
OUTAGE_SECONDS = 30.0  # that a command without a timeout waits through
PAUSE_SECONDS = 0.2  # between two tries


class AnswerKeys(NamedTuple):
    answers: str


class AnswerArgs(NamedTuple):
    seconds: int


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
        self._answer = client.register_script(ANSWER)

    def send(self, command_id: str, answers: Sequence[Answer]) -> None:
        """Add answers to a command. Raises redis.RedisError."""
        self._answer(
            keys=AnswerKeys(keys.answers(command_id)),
            args=[*AnswerArgs(ANSWERS_SECONDS), *(one.encode() for one in answers)],
        )


class Call:
    """A command that was sent to a worker, and the answers to it."""

    def __init__(self, client: redis.Redis, worker: str, command_id: str) -> None:
        self._redis: Any = client
        self.worker, self._id = worker, command_id
        self._sent_at = time.monotonic()
        # Monotonic: when the current outage of Redis has begun, and the last error of any.
        self._fails_since: float | None = None
        self._failed_at: float | None = None

    def answers(self, timeout: float | None = None) -> Iterator[Answer]:
        """The answers as they come, up to the last one, also through an outage of Redis. Raises its
        error, JobError if the worker is gone, if it does not answer, if the last answer has not
        come within `timeout` seconds after the command, or if it is not known because Redis is
        away, and redis.RedisError."""
        heard = False
        while True:
            try:
                found = self._redis.blpop([keys.answers(self._id)], timeout=POLL_SECONDS)
                alive = found is not None or _lease_left(self._redis, self.worker) > 0
            except redis.RedisError as error:
                self._wait_through(error, timeout)
                continue
            self._fails_since = None
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
            now = time.monotonic()
            waited, failed_at = now - self._sent_at, self._failed_at
            has_returned = failed_at is None or now - failed_at >= RETURN_SECONDS
            if has_returned and not alive:
                raise JobError(
                    "worker_lost",
                    f"worker {self.worker} is gone: it has not answered this command",
                )
            is_silent = has_returned and not heard and waited >= FIRST_ANSWER_SECONDS
            is_over = timeout is not None and waited >= timeout
            if failed_at is not None and (is_silent or is_over):
                raise self._unknown("Redis has failed meanwhile")
            if is_silent:
                raise JobError(
                    "timeout",
                    f"worker {self.worker} does not answer: it hangs, or its version is older than "
                    "this command",
                )
            if is_over:
                raise JobError(
                    "timeout", f"worker {self.worker} has not done it within {timeout:g} s"
                )

    def _wait_through(self, error: redis.RedisError, timeout: float | None) -> None:
        """Pause after an error of Redis. Raises it if it does not pass, and JobError if the outage
        lasts too long."""
        if not may_pass(error):
            raise error
        now = self._failed_at = time.monotonic()
        self._fails_since = self._fails_since or now
        begin, most = self._sent_at, timeout
        if most is None:
            begin, most = self._fails_since, OUTAGE_SECONDS
        if now - begin >= most:
            raise self._unknown(redis_failure(self._redis, error).message) from None
        time.sleep(PAUSE_SECONDS)

    def _unknown(self, reason: str) -> JobError:
        return JobError(
            "unavailable",
            f"the command was sent to worker {self.worker}; whether it took effect is not known "
            f"({reason}): chatjobs status shows it",
        )

    def result(self, timeout: float | None = None) -> Mapping[str, Any]:
        """The facts of the last answer. Raises as `answers`."""
        return [answer.facts for answer in self.answers(timeout)][-1]


def send(client: redis.Redis, worker: str, command: str, args: Mapping[str, Any]) -> Call:
    """Send a command to a worker. Raises JobError if nobody receives it, and redis.RedisError, also
    if the user may not command workers. While Redis takes no writes, nothing is sent."""
    command_id = uuid.uuid4().hex
    message = json.dumps({"command": command, "id": command_id, "args": args})
    deadline = time.monotonic() + RETURN_SECONDS
    while not _publish(client, worker, command_id, message):
        left = _lease_left(client, worker)
        if any(one["name"] == worker for one in read_statuses(client).loading):
            reason = "still loads its models: try again when it serves them"
            raise JobError("unavailable", f"worker {worker} {reason}")
        if left == -math.inf or (left <= 0 and time.monotonic() >= deadline):
            raise JobError(
                "not_found", f"no worker {worker} is running: chatjobs status lists those that are"
            )
        if time.monotonic() >= deadline:
            raise JobError(
                "unavailable",
                f"worker {worker} does not listen to commands now, as after an outage of Redis: "
                "try again",
            )
        time.sleep(PAUSE_SECONDS)  # it may subscribe again in a moment
    return Call(client, worker, command_id)


def _publish(client: redis.Redis, worker: str, command_id: str, message: str) -> int:
    """Send the message, and return how many clients have received it. The transaction has a write,
    which changes nothing: while Redis takes no writes, such as answers, it refuses both."""
    pipeline: Any = client.pipeline(transaction=True)
    pipeline.delete(keys.answers(command_id))
    pipeline.publish(PUBSUB_CHANNEL_TEMPLATE % worker, message)
    receivers: int
    _, receivers = pipeline.execute()
    return receivers


def _lease_left(client: redis.Redis, worker: str) -> float:
    """Milliseconds for which a worker holds its lease, which a thread of its own renews. After an
    outage of Redis they may be negative for a moment. -inf: it is no worker, or has signed off."""
    pipeline: Any = client.pipeline(transaction=False)
    pipeline.zscore(keys.WORKERS, worker)
    pipeline.time()
    lease, (seconds, _) = pipeline.execute()
    return -math.inf if lease is None else float(lease - seconds * 1000)
