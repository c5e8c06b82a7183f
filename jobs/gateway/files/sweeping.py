"""Removes the files of all tenants that have expired, while a gateway runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from jobs.disk_faults import explain
from jobs.gateway.files.stored import AREA, FileStore
from jobs.gateway.folders import WITHOUT_KEYS, names_in

SWEEP_SECONDS = 60.0

logger = logging.getLogger(__name__)


async def sweep_files(results: Path) -> None:
    """Sweep until this is cancelled. A disk that fails is tried again."""
    while True:
        try:
            await asyncio.to_thread(_sweep, results)
        except OSError as error:
            logger.warning("expired files are not removed: %s", explain(error, results))
        await asyncio.sleep(SWEEP_SECONDS)


def _sweep(results: Path) -> None:
    for name in names_in(results / AREA):
        FileStore(results, None if name == WITHOUT_KEYS else name).sweep()
