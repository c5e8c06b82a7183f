"""A worker in front of llama.cpp's HTTP server with a real model."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.cli.conftest import COMMAND
from tests.real.files import FOLDER, SMOLLM2
from tests.waiting import PATIENCE, wait_until
from tests.worker.site import Site

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
COUNTRIES = ("France", "Italy", "Spain", "Japan")


def question(country: str) -> str:
    return f"Question: What is the capital of {country}?\nAnswer:"


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    site = Site(redis_url, tmp_path / "results")
    yield site
    site.close()


@pytest.fixture
def llama_cpp() -> Iterator[str]:
    """The base URL of llama.cpp's server."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    words = ["--model", str(FOLDER / SMOLLM2), "--model_alias", "smollm2", "--n_ctx", "2048"]
    # By default it interrupts an answer when the next request comes.
    places = ["--host", "127.0.0.1", "--port", str(port), "--interrupt_requests", "false"]
    server = subprocess.Popen(
        [ROOT / ".oracle/bin/python", "-m", "llama_cpp.server", *words, *places]
    )
    url = f"http://127.0.0.1:{port}/v1"

    def answers() -> bool:
        assert server.poll() is None
        try:
            return bool(urlopen(f"{url}/models").read())
        except URLError:
            return False

    wait_until(answers)
    yield url
    server.kill()
    server.wait()


def test_answers_of_llama_cpp_reach_streams_and_parquet(site: Site, llama_cpp: str) -> None:
    command = [str(COMMAND), "work", "--upstream", llama_cpp, "--model", "small=smollm2"]
    places = ["--redis", site.url, "--results", str(site.folder), "--max-batch", "2"]
    worker = subprocess.Popen([*command, *places])
    jobs = site.client.submit_many(
        {
            "model": "small",
            "messages": [{"role": "user", "content": question(country)}],
            "temperature": 0,
            "max_tokens": 16,
            "job": {"run": "capitals", "row": row},
        }
        for row, country in enumerate(COUNTRIES)
    )
    try:
        streamed = ["".join(chunk.text for chunk in job.stream()) for job in jobs]
        results = list(site.client.gather(jobs, timeout=PATIENCE))
        stopped = site.submit("Tell me a long story.", model="small", max_tokens=1500)
        assert next(iter(stopped.stream())) is not None
        stopped.cancel()
        wait_until(lambda: stopped.status().over)
        again = site.submit("What is 2 + 3?", model="small", max_tokens=4)
        assert again.result(timeout=PATIENCE).text
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE) == 0
    assert streamed == [one.text for one in results]
    assert "Paris" in streamed[0]
    rows = sorted(site.rows("capitals"), key=lambda row: row["row_index"])
    assert [row["text"] for row in rows] == streamed
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}
    assert stopped.status().value == "cancelled"
