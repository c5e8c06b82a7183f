"""A warning about a request names the line of the user's code that made the request."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jobs import AsyncClient, ChatRequest, Client, IgnoredFieldWarning

FIELDS: Any = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hello"}],
    "service_tier": "auto",
}


def this_line() -> int:
    """The line that calls this function."""
    return sys._getframe(1).f_lineno


def ignored_fields(caught: Any) -> list[Any]:
    """Without the warnings about the model, which nobody serves."""
    return [one for one in caught if one.category is IgnoredFieldWarning]


def expect(caught: Any, *lines: int) -> None:
    assert {one.filename for one in caught} == {__file__}
    assert [one.lineno for one in ignored_fields(caught)] == list(lines)


def test_requests_made_in_python() -> None:
    with pytest.warns(IgnoredFieldWarning) as caught:
        start = this_line()
        ChatRequest(**FIELDS)
        ChatRequest.parse(FIELDS)
        ChatRequest.model_validate(FIELDS)
    expect(caught, start + 1, start + 2, start + 3)


def test_a_blocking_client(redis_url: str) -> None:
    with pytest.warns(IgnoredFieldWarning) as caught, Client(redis_url) as client:
        start = this_line()
        client.submit(FIELDS)
        client.submit_many([FIELDS])
        client.submit_many(FIELDS for _ in range(1))
        client.submit_many(made())
    expect(caught, start + 1, start + 2, start + 3, MADE)


def test_an_asyncio_client(redis_url: str) -> None:
    async def submit() -> int:
        async with AsyncClient(redis_url) as client:
            start = this_line()
            await client.submit(FIELDS)
            await client.submit_many([FIELDS])
            await client.submit_many(FIELDS for _ in range(1))
            await client.submit_many(made())
            return start

    with pytest.warns(IgnoredFieldWarning) as caught:
        start = asyncio.run(submit())
    expect(caught, start + 1, start + 2, start + 3, MADE)


def test_a_task_of_asyncio_names_the_line_that_runs_the_loop(redis_url: str) -> None:
    """The line that made the task is not on the stack any more."""

    async def submit() -> None:
        async with AsyncClient(redis_url) as client:
            await asyncio.gather(client.submit(FIELDS), client.submit_many([FIELDS]))

    with pytest.warns(IgnoredFieldWarning) as caught:
        start = this_line()
        asyncio.run(submit())
    expect(caught, start + 1, start + 1)


def test_a_thread_that_runs_nothing_but_our_code(redis_url: str) -> None:
    with pytest.warns(IgnoredFieldWarning) as caught, Client(redis_url) as client:
        thread = threading.Thread(target=client.submit, args=[FIELDS])
        thread.start()
        thread.join()
    assert len(ignored_fields(caught)) == 1


def made() -> Iterator[ChatRequest]:
    """A generator that makes its requests itself."""
    yield ChatRequest(**FIELDS)


MADE = made.__code__.co_firstlineno + 2
