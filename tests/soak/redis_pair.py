"""A primary and a replica behind one address, and what happens to them.

The address leads to whichever server is the primary. The replica reads from the primary through an
address as well, so that it can lag: what has not passed there when the primary dies is lost.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from tests.address import Address
from tests.servers import Server

SYNC_SECONDS = 0.3  # that a sync of the append-only file takes
# After which a write is on the disk: everysec, and a sync that waits for one. There are no two
# losses within this time: the second one could undo what was promised to survive one.
SYNCED_SECONDS = 4.0


class RedisPair:
    """`losses`: the times in which Redis has lost writes, as (from, until) of time.monotonic."""

    def __init__(self, binary: str, folder: Path) -> None:
        options = {"appendonly": "yes", "appendfsync": "everysec", "repl-timeout": "600"}
        servers = [Server(binary, folder / name, **options) for name in ("a", "b")]
        self.primary, self.replica = (server.log_syncs(SYNC_SECONDS) for server in servers)
        self.primary.start()
        self.replica.start()
        self.address, self._link = Address(self.primary), Address(self.primary)
        self.replica.replicate(self.primary, self._link.port)
        self.losses: list[tuple[float, float]] = []

    @property
    def url(self) -> str:
        return self.address.url

    def restart(self, seconds: float) -> None:
        """An ordered restart, after which all writes are there."""
        self.primary.stop()
        time.sleep(seconds)
        self.primary.start()
        self._follow()

    def silence(self, seconds: float) -> None:
        """No replies for a while; connections stay open."""
        self.primary.send(signal.SIGSTOP)
        time.sleep(seconds)
        self.primary.send(signal.SIGCONT)

    def cut_power(self, seconds: float) -> None:
        """The primary loses what its disk does not have, and the replica loses that too."""
        now = time.monotonic()
        self._link.hold()  # the replica must not serve what the primary forgets
        self.primary.lose_power()
        self.losses.append((now - SYNCED_SECONDS, time.monotonic()))
        time.sleep(seconds)
        self.primary.start()
        self._link.drop()
        self._link.flow()
        self._follow()
        time.sleep(SYNCED_SECONDS)

    def fail_over(self, seconds: float) -> None:
        """The replica lags for a while, then the primary dies and the replica takes its place.
        The old primary comes back as the replica."""
        since = time.monotonic()
        self._link.hold()
        time.sleep(seconds)
        self.primary.kill()
        self._link.drop()
        self.losses.append((since - 1.0, time.monotonic()))
        self.primary, self.replica = self.replica, self.primary
        self._link.move(self.primary)
        self.primary.client.execute_command("REPLICAOF", "NO", "ONE")
        self.address.move(self.primary)
        self.address.drop()
        self._link.flow()
        self.replica.start()
        self._follow()
        time.sleep(SYNCED_SECONDS)

    def fill(self, seconds: float, below: bool) -> None:
        """No room for further writes for a while; `below`: the memory in use exceeds the limit."""
        used = int(self.primary.client.info("memory")["used_memory"])
        self._limit(used * 9 // 10 if below else used + 2**18)
        time.sleep(seconds)
        self._limit(0)

    def info(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = self.primary.client.info(section)
        return found

    def close(self) -> None:
        self.address.close()
        self._link.close()
        self.primary.kill()
        self.replica.kill()

    def _follow(self) -> None:
        """Wait until the replica has what the primary has."""
        self.replica.replicate(self.primary, self._link.port)

    def _limit(self, memory: int) -> None:
        self.primary.client.config_set("maxmemory", memory)
