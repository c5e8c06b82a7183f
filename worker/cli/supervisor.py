"""The supervisor of `chatjobs work --devices`: starts a worker process for each device, starts it
again when it dies, and hands signals down.

The main thread owns all state. Signal handlers and the threads that look whether a worker serves
send it events; a thread for each worker copies its output.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple, NoReturn

import redis

from jobs.child import ChildProcess
from jobs.cli.failures import Failure, Interrupted, Unavailable, WrongInput
from jobs.cli.interrupts import INTERRUPTED
from jobs.cli.output import echo
from jobs.signals import ABORT_SECONDS
from jobs.store.connection.connect import URL_VARIABLE, connect
from jobs.store.damage import Damaged
from jobs.store.worker_status import read_workers
from worker.cli.device_commands import WorkerCommand

logger = logging.getLogger(__name__)

FIRST_DELAY = 1.0  # before a worker is started again; doubles with each death
LONGEST_DELAY = 60.0
STEADY_SECONDS = 60.0  # of service, after which the next delay is the first one
MOST_FAILURES = 5  # deaths in a row of a worker that has not served
LOOK_SECONDS = 1.0  # between two looks whether a worker serves
# Beyond --grace: for rows and the state of sessions; less than the time that the unit leaves.
STOP_SECONDS = 30.0
WAIT_SECONDS = 1.0  # for an event
OUTPUT_SECONDS = 2.0  # that the last lines of a worker that has ended may take
LINE_BYTES = 1 << 16

STOPS = (signal.SIGTERM, signal.SIGINT)
# A worker has no handlers for these: they end it, and this process after it.
KILLS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

USAGE, UNAVAILABLE, FAILED = WrongInput.exit_code, Unavailable.exit_code, Failure.exit_code
WORST_FIRST = (USAGE, UNAVAILABLE, FAILED, INTERRUPTED, 0)


class _Received(NamedTuple):
    number: int


class _Serves(NamedTuple):
    pid: int


Event = _Received | _Serves


def supervise(
    commands: Sequence[WorkerCommand], *, redis_url: str, grace: float, as_json: bool
) -> None:
    """Run the workers until all have ended: after a signal, because they were told to, or because
    one can't start. `grace`: of the workers; `as_json`: whether their log lines are JSON. Runs on
    the main thread.

    Raises Failure, with the exit code of the worker whose end was the worst."""
    # In the environment, since the URL may hold a password.
    commands = [
        replace(one, environment={**one.environment, URL_VARIABLE: redis_url}) for one in commands
    ]
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with connect(redis_url) as client, _handled_signals(events):
        supervisor = Supervisor(commands, events, client, grace, as_json=as_json)
        try:
            supervisor.run()
        finally:
            supervisor.close()
    if supervisor.killed_by is not None:
        _end_by(supervisor.killed_by)
    if supervisor.failure is not None:
        raise supervisor.failure


class _Running:
    """One process of a worker, with the threads that belong to it."""

    def __init__(
        self,
        command: WorkerCommand,
        events: queue.SimpleQueue[Event],
        serves: Callable[[int], bool],
        orphan_seconds: float,
        *,
        as_json: bool,
    ) -> None:
        """Raises OSError if the process can't be started, or not on its cores."""
        output, writer = os.pipe()
        try:
            with _on_cores(command.cores):
                self.child = ChildProcess(
                    command.words,
                    output=writer,
                    environment=command.environment,
                    orphan_seconds=orphan_seconds,
                )
        except OSError:
            os.close(output)
            raise
        finally:
            os.close(writer)
        self.served_from: float | None = None  # monotonic
        self.fault = ""  # the last error that it has written
        self._device, self._as_json = command.device, as_json
        self._ended = threading.Event()
        self._copier = threading.Thread(target=self._copy, args=(output,), daemon=True)
        self._copier.start()
        threading.Thread(target=self._look, args=(events, serves), daemon=True).start()

    @property
    def pid(self) -> int:
        return self.child.pid

    def end(self, seconds: float = 0.0) -> int:
        """The exit code of the process, which is terminated if it runs, and killed after `seconds`.
        What it has written is copied then."""
        self.child.stop(seconds)
        self._ended.set()
        self._copier.join(OUTPUT_SECONDS)  # a process of its own may hold the pipe
        return self.child.wait()

    def _copy(self, descriptor: int) -> None:
        with open(descriptor, "rb") as output:
            while line := output.readline(LINE_BYTES):
                # Of a progress bar, which returns to the start of its line, the last state.
                text = line.decode(errors="backslashreplace").rstrip("\r\n").rpartition("\r")[2]
                label, _, message = text.partition(": ")
                if label.lower() == "error":
                    self.fault = message
                echo(_with_device(text, self._device, as_json=self._as_json), err=True)

    def _look(self, events: queue.SimpleQueue[Event], serves: Callable[[int], bool]) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            if serves(self.pid):
                events.put(_Serves(self.pid))
                return


class _Place:
    """A device, and what has become of its worker. It has a running process, or a time at which one
    starts, or the exit code of the last one."""

    def __init__(self, command: WorkerCommand) -> None:
        self.command = command
        self.running: _Running | None = None
        self.start_at: float | None = 0.0  # monotonic
        self.code = 0
        self.delay = FIRST_DELAY
        self.failures = 0  # deaths in a row without having served
        self.has_served = False

    @property
    def device(self) -> str:
        return self.command.device

    @property
    def extra(self) -> dict[str, str]:
        """Of log records about it."""
        return {"device": self.device}


class Supervisor:
    """The workers of all devices. `failure`: of the worst end; `killed_by`: the signal of `KILLS`
    that has ended the workers."""

    def __init__(
        self,
        commands: Sequence[WorkerCommand],
        events: queue.SimpleQueue[Event],
        redis_client: redis.Redis,
        grace: float,
        *,
        as_json: bool,
    ) -> None:
        self._places = [_Place(command) for command in commands]
        self._events, self._redis, self._grace = events, redis_client, grace
        self._as_json = as_json
        self._handed_down: list[int] = []
        self._stop_by = float("inf")  # monotonic
        self.failure: Failure | None = None
        self.killed_by: int | None = None

    def run(self) -> None:
        """Return when no worker runs and none is to be started."""
        while True:
            now = time.monotonic()
            for place in self._places:
                self._advance(place, now)
            if not any(place.running or place.start_at is not None for place in self._places):
                break
            with suppress(queue.Empty):
                self._take(self._events.get(timeout=self._timeout(time.monotonic())))
        if self.failure is None:
            self.failure = self._worst_end()

    def close(self) -> None:
        """End what still runs, after an error of this process."""
        running = [place.running for place in self._places if place.running is not None]
        for one in running:
            one.child.send(signal.SIGTERM)
        for one in running:
            one.end(self._grace + STOP_SECONDS)

    def _timeout(self, now: float) -> float:
        """Until the next thing is due that no event announces. At most WAIT_SECONDS: a signal that
        comes just before the wait is handled at its end."""
        due = [place.start_at for place in self._places if place.start_at is not None]
        return min(WAIT_SECONDS, max(0.0, min([*due, self._stop_by]) - now))

    def _take(self, event: Event) -> None:
        if isinstance(event, _Serves):
            for place in self._places:
                if place.running is not None and place.running.pid == event.pid:
                    place.running.served_from = time.monotonic()
                    place.has_served = True
        elif event.number != signal.SIGCHLD:
            self._hand_down(event.number)

    def _advance(self, place: _Place, now: float) -> None:
        """Start its worker if that is due; see to it if it has ended, or has to by now."""
        if place.start_at is not None and now >= place.start_at:
            self._start(place)
        if place.running is None:
            return
        code = place.running.child.poll()
        if code is None and now >= self._stop_by:
            logger.warning(
                "%s: the worker does not stop in time: it is killed",
                place.device,
                extra=place.extra,
            )
            code = place.running.end()
        if code is not None:
            self._ended(place, code, now)

    def _start(self, place: _Place) -> None:
        place.start_at = None
        try:
            place.running = _Running(
                place.command,
                self._events,
                self._serves,
                self._grace + STOP_SECONDS,
                as_json=self._as_json,
            )
        except OSError as error:
            self._died(place, f"did not start ({error.strerror})", UNAVAILABLE)
        else:
            pid = place.running.pid
            logger.info("%s: started a worker: process %d", place.device, pid, extra=place.extra)

    def _ended(self, place: _Place, code: int, now: float) -> None:
        running, place.running = place.running, None
        assert running is not None
        running.end()
        if self._handed_down:
            place.code = 0 if -code in self._handed_down else FAILED if code < 0 else code
        elif code == 0:
            logger.info(
                "%s: the worker has ended, as it was told to", place.device, extra=place.extra
            )
        elif code == USAGE or (code == UNAVAILABLE and not place.has_served):
            self._give_up(place, f"can't start: {running.fault or f'exit code {code}'}", code)
        else:
            if running.served_from is not None and now - running.served_from >= STEADY_SECONDS:
                place.delay = FIRST_DELAY
            named = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
            how = f"ended ({named}{f': {running.fault}' if running.fault else ''})"
            self._died(place, how, code if code > 0 else FAILED, served=running.served_from)

    def _died(self, place: _Place, how: str, code: int, *, served: float | None = None) -> None:
        """Start the worker again after the delay, unless it never comes to serve."""
        place.failures = 0 if served is not None else place.failures + 1
        if place.failures >= MOST_FAILURES:
            times = f"{place.failures} times without having served"
            self._give_up(place, f"died {times}; the last one {how}", code)
            return
        logger.warning(
            "%s: the worker %s; another one starts in %g s",
            *(place.device, how, place.delay),
            extra=place.extra,
        )
        place.start_at = time.monotonic() + place.delay
        place.delay = min(2 * place.delay, LONGEST_DELAY)

    def _give_up(self, place: _Place, reason: str, code: int) -> None:
        """Stop the other workers. The first reason is the one of the exit code."""
        self.failure = _failure(code, f"the worker of {place.device} {reason}")
        logger.error("%s: the worker %s; the others stop", place.device, reason, extra=place.extra)
        self._hand_down(signal.SIGTERM)

    def _hand_down(self, number: int) -> None:
        """Send a signal to all workers, and start none from now on."""
        now = time.monotonic()
        if number in KILLS:
            self.killed_by = self.killed_by or number
        if self._handed_down or number in KILLS:
            self._stop_by = now + ABORT_SECONDS + OUTPUT_SECONDS
        else:
            self._stop_by = now + self._grace + STOP_SECONDS
        self._handed_down.append(number)
        for place in self._places:
            place.start_at = None
            if place.running is not None:
                place.running.child.send(number)

    def _worst_end(self) -> Failure | None:
        worst = min(self._places, key=lambda place: WORST_FIRST.index(_known(place.code)))
        if worst.code == 0:
            return None
        if worst.code == INTERRUPTED:
            return Interrupted("interrupted")
        return _failure(worst.code, f"the worker of {worst.device} ended: exit code {worst.code}")

    def _serves(self, pid: int) -> bool:
        """Whether Redis lists the process as a worker that serves. False while Redis is away."""
        host = socket.gethostname()
        with suppress(redis.RedisError, Damaged):
            return any(
                (one["host"], one.get("pid")) == (host, pid) for one in read_workers(self._redis)
            )
        return False


def _known(code: int) -> int:
    """The exit code of this process for that of a worker."""
    return code if code in WORST_FIRST else FAILED


def _failure(code: int, message: str) -> Failure:
    return {USAGE: WrongInput, UNAVAILABLE: Unavailable}.get(code, Failure)(message)


@contextmanager
def _handled_signals(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """A context in which signals are events. One that was ignored before stays so, as under nohup:
    workers ignore it, too."""

    def put(number: int, frame: object) -> None:
        events.put(_Received(number))  # SimpleQueue.put may be called in a signal handler

    before = {
        number: signal.signal(number, put)
        for number in (*STOPS, *KILLS, signal.SIGCHLD)
        if number not in KILLS or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _on_cores(cores: frozenset[int] | None) -> Iterator[None]:
    """A context in which processes start on these cores: they inherit those of this thread."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _with_device(text: str, device: str, *, as_json: bool) -> str:
    """A line of a worker with its device: a key of a JSON object, else before the line."""
    if as_json and text.startswith("{"):
        with suppress(ValueError):
            return json.dumps({"device": device, **json.loads(text)}, separators=(",", ":"))
    return f"[{device}] {text}"


def _end_by(number: int) -> NoReturn:
    """End this process by a signal, as its workers have."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise AssertionError("the signal has ended this process")
