"""URLs that name Sentinels instead of a server."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import Client, JobError
from jobs.store.connection.connect import connect, server_name
from jobs.store.connection.sentinel import SentinelURL


@pytest.mark.parametrize(
    ("url", "hosts", "master", "options", "of_sentinels"),
    [
        ("redis+sentinel://a/m", [("a", 26379)], "m", {"db": 0}, {}),
        ("redis+sentinel://a:1,[::1]:3/m/2", [("a", 1), ("::1", 3)], "m", {"db": 2}, {}),
        (
            "redis+sentinel://u:p%40%2F@a,b/m?socket_timeout=3&sentinel_password=s",
            [("a", 26379), ("b", 26379)],
            "m",
            {"db": 0, "username": "u", "password": "p@/", "socket_timeout": 3.0},
            {"password": "s"},
        ),
        ("rediss+sentinel://:p@a/m/", [("a", 26379)], "m", {"db": 0, "password": "p"}, {}),
    ],
)  # fmt: skip
def test_the_parts_of_a_url(
    url: str, hosts: Any, master: str, options: Any, of_sentinels: Any
) -> None:
    parsed = SentinelURL.parse(url)
    assert parsed == SentinelURL(url.startswith("rediss"), hosts, master, options, of_sentinels)


def test_other_urls_are_not_of_sentinels() -> None:
    assert SentinelURL.parse("redis://localhost/0") is None


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://a",
        "redis+sentinel://a/",
        "redis+sentinel:///m",
        "redis+sentinel://a:x/m",
        "redis+sentinel://a,,b/m",
        "redis+sentinel://u:secret/x@a/m",
        "redis+sentinel://a/m/x",
        "redis+sentinel://u:1/secret@a",
        "redis+sentinel://u:1/secret@a/m",
        "redis+sentinel://a/m#secret",
    ],
)
def test_an_invalid_url_is_one_sentence_without_the_password(url: str) -> None:
    with pytest.raises(JobError, match=r"redis\+sentinel://\[\[user\]:password@\]host") as caught:
        Client(url)
    assert "secret" not in caught.value.message


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(JobError, match="unknown option 'foo'"):
        Client("redis+sentinel://a/m?foo=1")


def test_without_a_sentinel_the_error_names_the_primary() -> None:
    url = "redis+sentinel://user:secret@127.0.0.1:1/mymaster"
    assert server_name(connect(url)) == "Sentinel's 'mymaster'"
    with Client(url) as client, pytest.raises(JobError, match="Sentinel's 'mymaster'") as caught:
        client.submit({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    assert "secret" not in caught.value.message


def test_a_cluster_url_is_refused_in_one_sentence() -> None:
    with pytest.raises(JobError, match="a Redis Cluster, which chatjobs does not support"):
        Client("redis+cluster://localhost:6379")
