"""The process that runs the batches of all tenants, beside a gateway: `python -m` this module, with
the results folder, the form of its log lines, and --quiet if the gateway is. The URL of Redis is in
the environment.

Each gateway has one, and the lease on the run of a batch says which of them runs it. It removes
batches that ended long ago.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections import Counter

import redis

from jobs.api.request import IgnoredFieldWarning
from jobs.client.client import Client
from jobs.disk_faults import explain
from jobs.errors import JobError
from jobs.gateway.batches.running import BatchRun, Left
from jobs.gateway.batches.stored import StoredBatch, stores
from jobs.log_lines import log_to_stderr
from jobs.results.files import Results
from jobs.signals import StopSignals
from jobs.store.producer_lease import LeaseLost

LOOK_SECONDS = 0.5  # between two looks for batches
AGAIN_SECONDS = 10.0  # after a failure, until a batch is tried again
HELD_SECONDS = 2.0  # until a batch that another process runs is looked at again
MOST = 32  # batches at once in one process
SWEEP_SECONDS = 600.0
END_SECONDS = 5.0  # for the threads, when the process ends

logger = logging.getLogger(__name__)


class Batches:
    """Runs each batch that has not ended in a thread. The tenant with the fewest is next."""

    def __init__(self, client: Client, results: Results) -> None:
        self.aborted = False
        self._client, self._results = client, results
        self._leaving = threading.Event()
        self._running: dict[str, tuple[threading.Thread, str | None]] = {}  # with their tenants
        self._not_before: dict[str, float] = {}  # monotonic
        self._ended: set[str] = set()
        self._next_sweep = 0.0

    def request_stop(self) -> None:
        self.aborted = self._leaving.is_set()
        self._leaving.set()

    def run(self) -> None:
        """Return when the process is told to end."""
        while not self._leaving.is_set():
            try:
                self._look()
            except OSError as error:
                logger.error("batches wait: %s", explain(error, self._results.root))
            self._leaving.wait(LOOK_SECONDS)
        for thread, _ in self._running.values():
            thread.join(END_SECONDS)

    def _look(self) -> None:
        self._running = {id: one for id, one in self._running.items() if one[0].is_alive()}
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            for store in stores(self._results.root):
                store.sweep()
        waiting = [one for one in self._open() if now >= self._not_before.get(one.id, 0.0)]
        while waiting and len(self._running) < MOST:
            count = Counter(tenant for _, tenant in self._running.values())
            chosen = min(waiting, key=lambda one: (count[one.tenant], one.id))
            waiting.remove(chosen)
            thread = threading.Thread(
                target=self._go_on, args=(chosen,), name=chosen.id, daemon=True
            )
            self._running[chosen.id] = thread, chosen.tenant
            thread.start()

    def _open(self) -> list[StoredBatch]:
        """The batches that have not ended and do not run here."""
        return [
            batch
            for store in stores(self._results.root)
            for batch in store.open(self._ended)
            if batch.id not in self._running
        ]

    def _go_on(self, batch: StoredBatch) -> None:
        pause = HELD_SECONDS
        try:
            BatchRun(batch, self._client, self._results, self._leaving).go_on()
        except (Left, LeaseLost):
            pass
        except (JobError, redis.RedisError, OSError) as error:
            pause = AGAIN_SECONDS
            logger.error("batch %s waits, and is tried again: %s", batch.id, error)
        except Exception:
            pause = AGAIN_SECONDS
            logger.exception("batch %s waits, and is tried again", batch.id)
        self._not_before[batch.id] = time.monotonic() + pause


def main() -> None:
    folder, form, *quiet = sys.argv[1:]
    log_to_stderr(form, quiet=bool(quiet))
    warnings.simplefilter("ignore", IgnoredFieldWarning)
    client = Client()
    batches = Batches(client, Results(folder))
    with StopSignals(batches, "other processes go on with the batches"):
        batches.run()
    client.close()


if __name__ == "__main__":
    main()
