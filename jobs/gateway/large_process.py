"""The process that answers requests with large bodies, beside a gateway: `python -m` this module,
with the path of its unix socket and the settings of the gateway as JSON. The URL of Redis is in the
environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from jobs.client.aio import AsyncClient
from jobs.client.job import AsyncJob
from jobs.gateway.gateway import Gateway
from jobs.gateway.server import prepare, server_of
from jobs.gateway.settings import PATHS, Settings
from jobs.log_lines import log_to_stderr
from jobs.store.connection.connect import redis_url

KILLED_SECONDS = 1.0  # after a connection was closed, until it is known whether its gateway is gone


class Beside(Gateway):
    """The gateway of this process. A gateway that is killed closes its connections, as one does
    whose client goes away: the jobs of the former go on."""

    def __init__(self, settings: Settings, client: AsyncClient) -> None:
        super().__init__(settings, client)
        self._parent = os.getppid()

    async def cancel(self, job: AsyncJob[Any, Any]) -> None:
        await asyncio.sleep(KILLED_SECONDS)
        if os.getppid() == self._parent:
            await super().cancel(job)


async def _serve(settings: Settings, listener: socket.socket) -> None:
    gateway = Beside(settings, AsyncClient(settings.redis_url))
    await server_of(gateway, "this socket", lifespan="off").serve(sockets=[listener])
    await gateway.close()
    gateway.tokenizers.close()


def main() -> None:
    path, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    given |= {name: Path(given[name]) for name in PATHS if given[name] is not None}
    given |= {"redis_url": redis_url(), "cors_origins": tuple(given["cors_origins"])}
    settings = Settings(**given)
    log_to_stderr(settings.log_form, quiet=True)
    prepare()
    path.unlink(missing_ok=True)  # of one that has died
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        asyncio.run(_serve(settings, listener))


if __name__ == "__main__":
    main()
