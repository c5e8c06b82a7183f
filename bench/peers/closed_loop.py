"""Serves requests so that a fixed number of them runs at any time, and notes when tokens come.
Imports the standard library only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

Request = tuple[list[int], int]  # a prompt, and the number of tokens of its answer


class Clock:
    """The seconds from the beginning of a run at which requests were submitted and tokens came."""

    def __init__(self, count: int) -> None:
        self._begin = time.perf_counter()
        self._submitted = [0.0] * count
        self._arrivals: list[list[float]] = [[] for _ in range(count)]

    def submitted(self, index: int) -> None:
        self._submitted[index] = time.perf_counter() - self._begin

    def came(self, index: int, tokens: int = 1) -> int:
        """Note further tokens of a request; returns how many it has."""
        self._arrivals[index] += [time.perf_counter() - self._begin] * tokens
        return len(self._arrivals[index])

    def reply(self) -> dict[str, Any]:
        return {"submitted": self._submitted, "arrivals": self._arrivals}


def threaded(
    requests: list[Request], at_once: int, tokens: Callable[[list[int], int], Iterable[object]]
) -> dict[str, Any]:
    """For engines that may be called from several threads: `tokens` yields for each token."""
    clock, waiting, lock = Clock(len(requests)), iter(enumerate(requests)), threading.Lock()
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            while True:
                with lock:
                    index, (prompt, count) = next(waiting, (-1, ([], 0)))
                if index < 0 or errors:
                    return
                clock.submitted(index)
                for _ in tokens(prompt, count):
                    clock.came(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return clock.reply()


def stepped(
    requests: list[Request],
    at_once: int,
    add: Callable[[int, list[int], int], None],
    step: Callable[[], Iterable[tuple[int, int]]],
) -> dict[str, Any]:
    """For engines that are stepped: `add` submits a request, `step` returns the requests that have
    new tokens, with their number."""
    clock, begun, running = Clock(len(requests)), 0, 0
    while running or begun < len(requests):
        while running < at_once and begun < len(requests):
            clock.submitted(begun)
            add(begun, *requests[begun])
            begun, running = begun + 1, running + 1
        for index, new in step():
            running -= clock.came(index, new) == requests[index][1]
    return clock.reply()
