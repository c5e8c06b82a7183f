"""Says on stderr that Redis does not answer, and that it answers again, while a command waits.

Commands that follow jobs try again for a while when Redis is away. This says why nothing comes.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from jobs.cli.output import echo

if TYPE_CHECKING:
    from redis import Redis

ASK_SECONDS = 1.0  # between two questions


class RedisWatch:
    """A context that asks Redis again and again, on a thread and a connection of its own.
    `patience`: seconds that it may take to answer. Says nothing with `quiet`."""

    def __init__(self, url: str, patience: float, *, quiet: bool) -> None:
        self._url, self._patience, self._quiet = url, patience, quiet
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        if not self._quiet:
            threading.Thread(target=self._run, name="redis watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        from jobs.store.connection.connect import connect, limit_waits, server_name

        answered = True
        with connect(self._url) as redis:
            limit_waits(redis, self._patience)
            while not self._ended.wait(ASK_SECONDS):
                answers = _answers(redis)
                if answers != answered and not self._ended.is_set():
                    now = "answers again" if answers else "does not answer: trying again"
                    echo(f"Redis at {server_name(redis)} {now}", err=True)
                answered = answers


def _answers(redis: Redis) -> bool:
    from redis import ConnectionError, RedisError, TimeoutError

    try:
        redis.ping()
    except (ConnectionError, TimeoutError):
        return False
    except RedisError:  # an error is an answer
        return True
    return True
