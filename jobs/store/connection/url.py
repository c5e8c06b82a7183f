"""Checks Redis URLs. Owns their options, and the errors about them, which show no secret.

A character that a password has not escaped, such as / or ?, ends the part of the URL that has the
password, and what follows looks like a host, a path or an option. So each part is checked, and no
error quotes a part of the URL that may belong to a password.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import parse_qsl

from jobs.errors import InvalidRequest, JobError, invalid

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
TLS_SCHEMES = ("rediss", "rediss+sentinel")
SENTINEL_PREFIX = "sentinel_"  # options of the connections to the Sentinels: sentinel_username, …

FORM = (
    "the form is redis://[[user]:password@]host[:port][/db], rediss://…, "
    "unix://[[user]:password@]/path or "
    "redis+sentinel://[[user]:password@]host[:port],…/master[/db]; escape special characters of a "
    "password as %XX: @ as %40, / as %2F, ? as %3F, # as %23, : as %3A, % as %25"
)
NO_CLUSTER = (
    "Redis at {} is a Redis Cluster, which chatjobs does not support: use one server, or a primary "
    "with replicas and Sentinel (redis+sentinel://…)"
)

WITHOUT_SCHEME = re.compile(
    r"(localhost|[\w-]+(\.[\w-]+)+|[\w-]+(?=[:/]))(:\d+)?(/\d+)?"
)  # host[:port][/db]
SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,30}")
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:@]*)(:\d{1,5})?")
DATABASE = re.compile(r"\d*/?")


class Option(NamedTuple):
    """An option of a URL: what its value is, in words, and whether a text is such a value."""

    kind: str
    accepts: Callable[[str], bool]


def _is_seconds(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _whole(least: int) -> Option:
    return Option(
        f"a whole number from {least} on",
        lambda text: text.isdecimal() and len(text) < 16 and int(text) >= least,
    )


_TEXT = Option("a text", bool)
_SECONDS = Option("a number of seconds above 0", _is_seconds)
_SWITCH = Option(
    "True or False", lambda text: text.lower() in ("true", "yes", "1", "false", "no", "0")
)
_CERTIFICATES = Option(
    "none, optional or required", lambda text: text in ("none", "optional", "required")
)

OPTIONS: dict[str, Option] = {
    "db": _whole(0),
    "username": _TEXT,
    "password": _TEXT,
    "client_name": _TEXT,
    "socket_timeout": _SECONDS,
    "socket_connect_timeout": _SECONDS,
    "socket_keepalive": _SWITCH,
    "socket_read_size": _whole(1),
    "health_check_interval": _whole(0),
    "max_connections": _whole(1),
    "retry_on_timeout": _SWITCH,
    "ssl_ca_certs": _TEXT,
    "ssl_ca_path": _TEXT,
    "ssl_ca_data": _TEXT,
    "ssl_certfile": _TEXT,
    "ssl_keyfile": _TEXT,
    "ssl_password": _TEXT,
    "ssl_cert_reqs": _CERTIFICATES,
    "ssl_check_hostname": _SWITCH,
    "ssl_min_version": _whole(1),
    "ssl_ciphers": _TEXT,
}
# Options of redis-py with which replies have other types than this library reads.
OF_REPLIES = (
    *("decode_responses", "encoding", "encoding_errors", "protocol", "legacy_responses"),
    *("parser_class", "encoder_class"),
)


def check_url(url: str) -> None:
    """Raises InvalidRequest for a URL of another form, and for an option that is unknown, has a
    wrong value, or changes the types of replies."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        raise bad_url(url)
    place, _, query = rest.partition("?")
    if "#" in rest or not _is_place(scheme, place):
        raise bad_url(url)
    try:
        for name, value in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
            _check_option(scheme, name, value)
    except InvalidRequest:
        if "@" in query:  # its name may be a part of the password
            raise bad_url(url) from None
        raise
    except ValueError:  # no name=value
        raise bad_url(url) from None


def bad_url(url: str) -> JobError:
    """The error about a URL of another form."""
    if WITHOUT_SCHEME.fullmatch(url):
        return invalid(f"the Redis URL {url!r} has no scheme: did you mean redis://{url}?", "url")
    scheme, separator, _ = url.partition("://")
    named = bool(separator) and SCHEME.fullmatch(scheme) is not None
    if named and "cluster" in scheme:
        return invalid(NO_CLUSTER.format("the URL"), "url")
    unknown = named and scheme not in SCHEMES
    what = f"has the unknown scheme {scheme!r}" if unknown else "is invalid"
    if not separator:
        what = "has no scheme"
    return invalid(f"the Redis URL {what}: {FORM}", "url")


def _is_place(scheme: str, place: str) -> bool:
    """True if `place`, the part before the options, has the form of this scheme."""
    authority, slash, path = place.partition("/")
    login, at, host = authority.rpartition("@")
    if scheme == "unix":
        return bool(slash and path) and not host and (bool(login) or not at)
    if "sentinel" in scheme:
        return True  # SentinelURL reads it
    return HOST.fullmatch(host) is not None and DATABASE.fullmatch(path) is not None


def _check_option(scheme: str, name: str, value: str) -> None:
    known = name
    if "sentinel" in scheme:
        known = name.removeprefix(SENTINEL_PREFIX)
    if known in OF_REPLIES:
        raise invalid(
            f"the Redis URL has the option '{name}', which changes the types of replies, and "
            "chatjobs could not read them: remove it",
            "url",
        )
    if known.startswith("ssl_") and scheme not in TLS_SCHEMES:
        raise invalid(f"the option '{name}' of the Redis URL needs TLS: write rediss://", "url")
    option = OPTIONS.get(known)
    if option is None:
        raise invalid(
            f"the Redis URL has an unknown option '{name}': remove it; the options are "
            f"{', '.join(OPTIONS)}",
            "url",
        )
    if not option.accepts(value):
        raise invalid(f"the option '{name}' of the Redis URL must be {option.kind}", "url")
