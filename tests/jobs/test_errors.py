"""JobError and its classes, and docs/errors.md, which lists the codes."""

from __future__ import annotations

import asyncio
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import AsyncClient, Client, JobError, WaitTimeout
from jobs.errors import ERROR_CODES, InvalidRequest, invalid
from jobs.store.connection import protocol

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
UNREACHABLE = "redis://127.0.0.1:1/0"
REQUEST: Any = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def test_the_page_lists_every_code_and_whether_it_is_retryable() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (yes|no) \|$", PAGE, re.MULTILINE)
    assert [code for code, _ in rows] == list(ERROR_CODES)
    for code, retryable in rows:
        assert JobError(code, "").retryable == (retryable == "yes"), code


@pytest.mark.parametrize("error", [WaitTimeout("late"), invalid("bad", "top_p")])
def test_an_error_survives_pickle_with_its_class(error: JobError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.to_dict() == error.to_dict()
    assert str(copy) == str(error)


def test_the_time_limit_of_a_wait_is_a_timeout_error(client: Client) -> None:
    job = client.submit(REQUEST)
    waits: list[Callable[[], object]] = [
        lambda: job.result(timeout=0),
        lambda: client.gather(job, timeout=0),
        lambda: list(client.as_completed([job], timeout=0)),
        lambda: client.wait_for_rows([job], timeout=0),
    ]
    for wait in waits:
        with pytest.raises(TimeoutError) as caught:
            wait()
        assert isinstance(caught.value, WaitTimeout)
        assert (caught.value.code, caught.value.retryable) == ("timeout", True)
        assert "has not ended after 0 s (status: queued)" in caught.value.message


def test_the_time_limit_of_a_job_is_no_timeout_of_a_wait() -> None:
    error = JobError.from_dict(JobError("timeout", "ttl").to_dict())
    assert not isinstance(error, TimeoutError)
    assert not error.retryable


def test_an_unknown_job_is_not_found(client: Client) -> None:
    job = client.job("nobody")
    for use in (job.result, job.cancel, lambda: job.request, lambda: next(job.stream())):
        with pytest.raises(JobError, match="no job 'nobody' in Redis") as caught:
            use()
        assert (caught.value.code, caught.value.param) == ("not_found", "id")
        assert not isinstance(caught.value, InvalidRequest)


def test_an_unreachable_redis_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "RECONNECT_SECONDS", 0.0)

    async def status() -> None:
        async with AsyncClient(UNREACHABLE) as client:
            await client.job("some-job").status()

    with Client(UNREACHABLE) as client:
        for use in (
            client.job("some-job").result,
            lambda: client.submit(REQUEST),
            lambda: asyncio.run(status()),
        ):
            with pytest.raises(JobError, match=r"can't reach Redis at 127\.0\.0\.1:1") as caught:
                use()
            assert (caught.value.code, caught.value.retryable) == ("unavailable", True)
