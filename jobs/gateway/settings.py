"""The settings of a gateway process."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import invalid

MAX_BODY = 16 * 2**20
MAX_FILE = 200 * 2**20
MAX_CONNECTIONS = 10_000
PATHS = ("results", "api_key_file", "tls_cert", "tls_key")  # settings of this type


@dataclass(frozen=True, slots=True)
class Settings:
    """How a gateway serves. `results`: the folder of the result data sets. Bodies in bytes."""

    redis_url: str
    results: Path
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    forwarded_allow_ips: str | None = None  # proxies whose X-Forwarded-* headers are believed
    cors_origins: tuple[str, ...] = ()
    max_body: int = MAX_BODY
    max_file: int = MAX_FILE
    max_connections: int = MAX_CONNECTIONS
    ping_seconds: float = 15.0  # from one byte of a stream to the next
    read_seconds: float = 60.0  # for the head of a request, and for its body
    write_seconds: float = 60.0  # without a byte that a client takes
    grace_seconds: float = 25.0  # for the replies that are open when the process is told to stop
    log_form: str = "text"  # or json, of the lines of the process that runs batches
    quiet: bool = False  # without its lines of the level INFO

    def check(self) -> None:
        """Raises InvalidRequest for settings that no gateway starts with."""
        if self.api_key_file is None and not is_loopback(self.host):
            raise invalid(
                f"--host {self.host}: other machines can reach this address, and no keys are set: "
                "give --api-key-file FILE, or listen on 127.0.0.1",
                "host",
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise invalid(
                "TLS needs both the certificate and its key: give --tls-cert and --tls-key",
                "tls_cert",
            )


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
