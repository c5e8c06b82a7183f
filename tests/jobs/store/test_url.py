"""Redis URLs: their parts and options. No error shows a part of a password."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from redis import connection
from redis.asyncio import connection as async_connection

from jobs import AsyncClient, Client, JobError
from jobs.cli import build
from jobs.store.connection.url import OF_REPLIES, OPTIONS
from tests.listener import Listener

OF_CONNECTIONS = {
    name
    for module in (connection, async_connection)
    for kind in ("AbstractConnection", "Connection", "SSLConnection", "UnixDomainSocketConnection")
    for name in inspect.signature(getattr(module, kind).__init__).parameters
} - {"self", "kwargs", "host", "port", "path"}
URLS = ("redis://h/0?{}", "rediss://h/0?{}", "unix:///s?{}", "redis+sentinel://h/m?{}")


async def open_async(url: str) -> None:
    async with AsyncClient(url):
        pass


def open_sync(url: str) -> None:
    Client(url).close()


def refused(url: str) -> str:
    """The error of both clients."""
    with pytest.raises(JobError) as caught:
        open_sync(url)
    with pytest.raises(JobError) as same:
        asyncio.run(open_async(url))
    assert same.value.message == caught.value.message
    assert (caught.value.code, caught.value.param) == ("invalid_request", "url")
    assert "\n" not in caught.value.message
    return str(caught.value.message)


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("name", sorted(OF_CONNECTIONS | set(OF_REPLIES)))
def test_every_option_of_the_package_redis_is_taken_or_refused_by_name(name: str, url: str) -> None:
    """Those that change the types of replies are refused, whatever their value."""
    if name in OPTIONS:
        return
    message = refused(url.format(f"{name}=True"))
    assert f"option '{name}'" in message
    assert "remove it" in message or "needs TLS" in message
    assert ("changes the types of replies" in message) == (name in OF_REPLIES)


@pytest.mark.parametrize("name", ["decode_responses", "protocol", "encoding"])
def test_options_for_sentinels_are_checked_as_well(name: str) -> None:
    message = refused(f"redis+sentinel://h/m?sentinel_{name}=3")
    assert f"option 'sentinel_{name}', which changes the types of replies" in message


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_an_option_with_a_good_value_is_taken_by_every_kind_of_client(name: str) -> None:
    value = next(value for value in ("7", "True", "none") if OPTIONS[name].accepts(value))
    if name == "ssl_min_version":
        value = "771"
    url = f"rediss://h/0?{name}={value}"
    open_sync(url)
    asyncio.run(open_async(url))


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("socket_timeout=abc", "a number of seconds above 0"),
        ("socket_timeout=0", "a number of seconds above 0"),
        ("socket_timeout=nan", "a number of seconds above 0"),
        ("max_connections=-1", "a whole number from 1 on"),
        ("db=x", "a whole number from 0 on"),
        ("socket_keepalive=maybe", "True or False"),
        ("ssl_cert_reqs=some", "none, optional or required"),
    ],
)
def test_a_wrong_value_is_named(option: str, kind: str) -> None:
    name = option.partition("=")[0]
    assert f"the option '{name}' of the Redis URL must be {kind}" in refused(f"rediss://h?{option}")


def test_tls_options_need_tls() -> None:
    assert "needs TLS: write rediss://" in refused("redis://h?ssl_ca_certs=f")


PASSWORDS = (
    "se/cr@et",
    "12/cr@et",
    "se?cr=et",
    "12?cr=et",
    "12?db=et",
    "12?cr",
    "se#cret",
    "12#cret",
)


@pytest.mark.parametrize(
    "url",
    [
        *(f"redis://user:{word}@host:6379/0" for word in PASSWORDS),
        *(f"rediss://user:{word}@host:6379/0" for word in PASSWORDS),
        *(f"redis://:{word}@host" for word in PASSWORDS),
        *(f"unix://user:{word}@/run/redis.sock" for word in PASSWORDS),
        *(f"redis+sentinel://user:{word}@host:26379/main" for word in PASSWORDS),
        *("redis://user:se[cret@host", "user:12://cret@host", "redis://user:12:cret@host:x"),
        *("redis://host/cret", "unix://cret", "redis://user:cret"),
    ],
)  # fmt: skip
def test_an_error_about_a_url_shows_no_part_of_it_and_says_how_to_escape(url: str) -> None:
    message = refused(url)
    shown = message.partition("the form is")[0]
    for part in ("se", "cr", "12", "et", "user", "host"):
        assert part not in shown.replace("Redis URL", "").replace("is invalid", "")
    assert "@ as %40, / as %2F, ? as %3F" in message


@pytest.mark.parametrize("word", PASSWORDS)
def test_the_remedy_works(redis_server: Any, redis_url: str, word: str) -> None:
    with Client(redis_url) as admin:
        admin.redis.acl_setuser(
            "escaped", enabled=True, passwords=[f"+{word}"], commands=["+@all"], keys=["*"]
        )
    try:
        at = redis_server.tcp_url.removeprefix("redis://")
        with Client(f"redis://escaped:{quote(word, safe='')}@{at}") as client:
            assert client.redis.ping()
    finally:
        with Client(redis_url) as admin:
            admin.redis.acl_deluser("escaped")


def test_status_and_work_show_no_part_of_a_password() -> None:
    for command in (["status"], ["work", "--model", "demo"], ["follow", "j"]):
        result = CliRunner().invoke(build(), [*command, "--redis", "redis://user:12/cr@et@host"])
        assert result.exit_code == 2
        assert "%40" in result.stderr
        assert "cr@et" not in result.output and "user:12" not in result.output


def repeat_words(client: socket.socket) -> None:
    """Serve as an old server or a proxy that knows no command: its errors repeat the words."""
    while words := client.recv(65536).decode().split("\r\n"):
        if words == [""]:
            return
        said = " ".join(f"`{word}`," for word in words if word and word[0] not in "*$")
        client.sendall(f"-ERR unknown command, with args: {said}\r\n".encode())


@pytest.fixture
def echo() -> Iterator[Listener]:
    with closing(Listener(repeat_words)) as server:
        yield server


def test_a_server_that_repeats_the_login_shows_no_password(echo: Listener, tmp_path: Path) -> None:
    url = f"redis://user:se%2Fcret@127.0.0.1:{echo.port}/0"
    with Client(url) as client, pytest.raises(JobError) as caught:
        client.job("x").status()
    result = CliRunner().invoke(build(), ["status", "--redis", url])
    assert result.exit_code == 3

    async def ask() -> None:
        async with AsyncClient(url) as client:
            await client.job("x").status()

    with pytest.raises(JobError) as same:
        asyncio.run(ask())
    for text in (
        caught.value.message,
        str(caught.value.__cause__),
        result.output,
        same.value.message,
    ):
        assert "se/cret" not in text
        assert "***" in text
