"""The follower processes of one model: starts them, notices that one has ended or that they stand
still, and ends them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from worker.processes.activity import Activity

FOLLOWER = "worker.engine.follower"
LOOK_SECONDS = 0.25
# Of followers that are stopped, or do not work while the leader waits for them, counted in looks:
# while this process was suspended, they were as well.
STALL_SECONDS = 5.0
# While they read weights, when they may wait for a compiler, and of those that compute on GPUs,
# whose processes wait while the GPUs work.
LONG_STALL_SECONDS = 120.0
END_SECONDS = 5.0  # that followers have to end by themselves


class Watch:
    """Runs a follower for each of `sockets`, on the cores that it has in `cores`, if any. `memory`:
    the descriptor that all get. `awaited` names the ranks that the leader waits for; `at_end` is
    called when followers were killed. `on_gpus`: that is where they compute.

    Followers are children of the thread here, which lives as long as they do: the system kills
    them with it, whatever ends the process. As soon as one has ended, has been stopped for
    STALL_SECONDS, or those that the leader waits for stand still, the others are killed and `lost`
    says why. Raises OSError if one can't be started.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        memory: int,
        cores: Sequence[frozenset[int]],
        *,
        awaited: Callable[[], Sequence[int]],
        at_end: Callable[[], None],
        on_gpus: bool,
    ) -> None:
        self.lost: str | None = None  # set before `ended`
        self.ended = threading.Event()  # all followers have ended, or are killed
        self.computing = False  # they have read their weights
        self._sockets, self._memory, self._cores = sockets, memory, cores
        self._awaited, self._at_end, self._on_gpus = awaited, at_end, on_gpus
        self._processes: list[subprocess.Popen[bytes]] = []
        self._fault: OSError | None = None
        self._end_seconds = END_SECONDS
        self._started, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._fault is not None:
            raise self._fault

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def stop(self, seconds: float = END_SECONDS) -> None:
        """Wait for the followers, whose sockets are closed, kill those that go on for `seconds`,
        and end the thread."""
        self._end_seconds = seconds
        self._stopping.set()
        self._thread.join()

    # --- on the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._start()
        except OSError as error:
            self._fault = error
            self._kill()
            self._started.set()
            return
        self._started.set()
        activities = [Activity(process.pid) for process in self._processes]
        still = stopped = 0.0
        while not self._stopping.wait(LOOK_SECONDS):
            works = [activity.works() for activity in activities]
            awaited = self._awaited()
            still = still + LOOK_SECONDS if awaited else 0.0
            if any(works[rank - 1] for rank in awaited):
                still = 0.0
            quick = self.computing and not self._on_gpus
            limit = STALL_SECONDS if quick else LONG_STALL_SECONDS
            away = [rank for rank, one in enumerate(activities, start=1) if one.stopped]
            stopped = stopped + LOOK_SECONDS if away else 0.0
            lost = self._who_ended()
            if lost is None and stopped >= STALL_SECONDS:
                lost = f"{self._named(*away)} was stopped for {STALL_SECONDS:g} s"
            elif lost is None and still >= limit:
                lost = f"{self._named(*awaited)} did nothing for {limit:g} s"
            if lost is not None:
                self.lost = lost
                break
        else:
            deadline = time.monotonic() + self._end_seconds
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        # A child has the cores of the thread that starts it, also while it imports.
        own = os.sched_getaffinity(0) if self._cores else None
        for rank, one in enumerate(self._sockets, start=1):
            if self._cores:
                os.sched_setaffinity(0, self._cores[rank])
            numbers = map(str, (one.fileno(), self._memory, os.getpid()))
            command = [sys.executable, "-P", "-m", FOLLOWER, *numbers]
            # The new session keeps the terminal's Ctrl-C from it.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(one.fileno(), self._memory),
                start_new_session=True,
            )
            self._processes.append(process)
            one.close()
        if own is not None:
            os.sched_setaffinity(0, own)

    def _who_ended(self) -> str | None:
        found = [
            (status, rank)
            for rank, process in enumerate(self._processes, start=1)
            if (status := process.poll()) is not None
        ]
        if not found:
            return None
        status, rank = min(found)  # others exit when they notice that one was killed
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exits {status}"
        return f"{self._named(rank)} {how}"

    def _named(self, *ranks: int) -> str:
        return ", ".join(f"rank {rank} (process {self._processes[rank - 1].pid})" for rank in ranks)

    def _kill(self) -> None:
        """Kill the followers, also those that are stopped."""
        for process in self._processes:
            process.kill()
        self._at_end()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # one that a driver holds
                process.wait(END_SECONDS)
        self.ended.set()
