"""URLs of a primary that Redis Sentinel names. redis-py has no such form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import unquote

from redis.connection import parse_url

from jobs.store.connection.url import SENTINEL_PREFIX

SENTINEL_PORT = 26379

_URL = re.compile(
    r"(?P<scheme>rediss?)\+sentinel://(?:(?P<login>[^@/?]*)@)?(?P<hosts>[^@/?]+)"
    r"/(?P<master>[^/?@]+)(?:/(?P<db>\d*))?(?:\?(?P<options>.*))?"
)
_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<name>[^:\[\]]+))(?::(?P<port>\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class SentinelURL:
    """redis+sentinel://[[user]:password@]host[:port],host[:port],…/master[/db][?option=value&…]

    The hosts are Sentinels, with port 26379 by default; user, password, db and the options are
    those of the Redis servers. `?sentinel_username=…&sentinel_password=…` are for the Sentinels.
    With rediss+sentinel:// all connections use TLS.
    """

    tls: bool
    sentinels: list[tuple[str, int]]
    master: str
    options: dict[str, Any]  # of connections to the servers
    of_sentinels: dict[str, Any]  # of connections to the Sentinels

    @classmethod
    def parse(cls, url: str) -> Self | None:
        """None for a URL of another form. Raises ValueError for an invalid one."""
        if not url.startswith(("redis+sentinel:", "rediss+sentinel:")):
            return None
        found = _URL.fullmatch(url)
        if found is None:
            raise ValueError("not the form of a Sentinel URL")
        login = f"{found['login']}@" if found["login"] else ""
        # One server's URL with the same parts: redis-py parses the login and the options.
        options = parse_url(  # type: ignore[no-untyped-call]
            f"{found['scheme']}://{login}server/{found['db'] or 0}?{found['options'] or ''}"
        )
        del options["host"]
        options.pop("connection_class", None)
        for_sentinels = {
            name.removeprefix(SENTINEL_PREFIX): options.pop(name)
            for name in list(options)
            if name.startswith(SENTINEL_PREFIX)
        }
        hosts = [_address(host) for host in found["hosts"].split(",")]
        master = unquote(found["master"])
        return cls(found["scheme"] == "rediss", hosts, master, options, for_sentinels)


def _address(host: str) -> tuple[str, int]:
    found = _HOST.fullmatch(host)
    if found is None:
        raise ValueError("a Sentinel is host or host:port")
    return found["ipv6"] or found["name"], int(found["port"] or SENTINEL_PORT)
