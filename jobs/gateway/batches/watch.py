"""Keeps the process that runs batches beside a gateway, from the first batch on."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from jobs.child import ChildProcess
from jobs.disk_faults import explain
from jobs.gateway.batches.stored import stores
from jobs.gateway.settings import Settings
from jobs.store.connection.connect import URL_VARIABLE

LOOK_SECONDS = 1.0
AGAIN_SECONDS = 10.0  # after a failure of the disk
END_SECONDS = 8.0  # of the process, after SIGTERM

logger = logging.getLogger(__name__)


async def watch_batches(settings: Settings) -> None:
    """Start the process when there is a batch that has not ended, and again if it dies, until this
    is cancelled. It ends with this process, however that ends."""
    child: ChildProcess | None = None
    ended: set[str] = set()
    try:
        while True:
            pause = LOOK_SECONDS
            if child is not None and child.poll() is not None:
                logger.error("the process of the batches has died: it is started again")
                child.stop(0)
                child = None
            try:
                if child is None and await asyncio.to_thread(_are_open, settings.results, ended):
                    child = _start(settings)
            except OSError as error:
                logger.error("batches wait: %s", explain(error, settings.results))
                pause = AGAIN_SECONDS
            await asyncio.sleep(pause)
    finally:
        if child is not None:
            await asyncio.to_thread(child.stop, END_SECONDS)


def _are_open(results: Path, ended: set[str]) -> bool:
    return any(True for store in stores(results) for _ in store.open(ended))


def _start(settings: Settings) -> ChildProcess:
    # The URL may have a password, which a command line would show.
    environment = {**os.environ, URL_VARIABLE: settings.redis_url}
    module = "jobs.gateway.batches.process"
    command = [sys.executable, "-P", "-m", module, str(settings.results.absolute())]
    command += [settings.log_form, *(["--quiet"] if settings.quiet else [])]
    return ChildProcess(command, environment=environment)
