"""curl with the gateway: streams, going on after an event, uploads, and errors."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs.store.job_state import Status
from tests.jobs.gateway.conftest import Start, chat, read_events, text_in
from tests.waiting import PATIENCE, wait_until
from tests.worker.fake_backend import text_of
from tests.worker.site import Site

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

CURL = ("curl", "--silent", "--show-error", "--no-buffer", "--fail-with-body", "--max-time", "600")
HTTP_ERROR = 22  # curl's exit code, with --fail-with-body


@contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A curl, which is stopped at the end."""
    curl = subprocess.Popen([*CURL, *words], stdout=subprocess.PIPE, text=True)
    with curl:
        yield curl
        curl.terminate()


def events_of(curl: subprocess.Popen[str]) -> Iterator[tuple[str | None, str]]:
    assert curl.stdout is not None
    return read_events(line.rstrip("\n") for line in curl.stdout)


def run(*words: str) -> tuple[int, str]:
    """The exit code and the output of a curl."""
    done = subprocess.run([*CURL, *words], stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout


def test_tokens_come_while_the_job_runs_and_a_stopped_curl_cancels_it(
    site: Site, start: Start
) -> None:
    site.worker(delay=0.05)
    site.wait_for_workers()
    body = chat(stream=True, metadata={"words": "100000"}, job={"id": "mine"})
    url = f"{start().url}/v1/chat/completions"
    with running(url, "--json", json.dumps(body)) as curl:
        events = events_of(curl)
        seen = [next(events) for _ in range(3)]
        job = site.client.job("mine")
        assert job.status() is Status.STARTED
        assert text_in(seen) and text_of(job.request).startswith(text_in(seen))
    wait_until(lambda: job.status() is Status.CANCELLED)


def test_it_goes_on_after_the_event_of_a_header(site: Site, start: Start) -> None:
    site.worker()
    site.wait_for_workers()
    url = f"{start().url}/v1/chat/completions"
    with running(url, "--json", json.dumps(chat(stream=True))) as curl:
        events = list(events_of(curl))
        assert curl.wait(PATIENCE) == 0
    assert events[-1][1] == "[DONE]"
    last, chunk = events[0]
    path = f"{url}/{json.loads(chunk)['id']}/stream"
    with running(path, "--header", f"Last-Event-ID: {last}") as curl:
        assert list(events_of(curl)) == events[1:]
        assert curl.wait(PATIENCE) == 0


def test_an_error_has_its_body_and_a_failed_exit(start: Start) -> None:
    ended, output = run(f"{start().url}/v1/chat/completions", "--json", json.dumps(chat()))
    assert (ended, json.loads(output)["error"]["code"]) == (HTTP_ERROR, "model_not_found")


def test_it_uploads_a_file_and_has_its_bytes_again(start: Start, tmp_path: Path) -> None:
    """curl asks for `100 Continue` before it sends a body of more than a megabyte."""
    gateway = start("--results", str(tmp_path / "results"))
    (tmp_path / "large.jsonl").write_text(json.dumps({"text": "x" * 2_000_000}))
    form = ["--form", "purpose=user_data", "--form", f"file=@{tmp_path}/large.jsonl"]
    ended, output = run(f"{gateway.url}/v1/files", *form)
    assert ended == 0, output
    assert json.loads(output)["filename"] == "large.jsonl"
    path = f"{gateway.url}/v1/files/{json.loads(output)['id']}/content"
    assert run(path) == (0, (tmp_path / "large.jsonl").read_text())
