"""The cost of scraping a worker's metrics while it works.

    python -m bench.scrapes [--jobs 500] [--scrapes 1000] [--rounds 3]

A worker with the demo model answers jobs of 64 tokens, in turns with and without a client that
reads `/metrics` as often as given in each turn. Prints the seconds of each turn, and the ratio of
the medians.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import click

from bench.harness import median, wait_for_worker
from jobs import ChatRequest, Client
from jobs.embedded import EmbeddedRedis

COMMAND = str(Path(sys.executable).with_name("chatjobs"))
MODEL, TOKENS = "demo", 64
SECONDS = 120.0  # time limit of the start


class Scraper:
    """Reads `/metrics` so many times in a thread, in equal steps of `seconds`."""

    def __init__(self, port: int, scrapes: int, seconds: float) -> None:
        self._port, self._scrapes, self._step = port, scrapes, seconds / scrapes
        self.taken: list[float] = []  # seconds of each
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Scraper:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        connection = HTTPConnection("127.0.0.1", self._port)
        next_time = time.perf_counter()
        for _ in range(self._scrapes):
            time.sleep(max(0.0, next_time - time.perf_counter()))
            next_time += self._step
            begin = time.perf_counter()
            connection.request("GET", "/metrics")
            reply = connection.getresponse()
            reply.read()
            assert reply.status == 200
            self.taken.append(time.perf_counter() - begin)
        connection.close()


def answer(client: Client, jobs: int, turn: str) -> float:
    """Seconds until all jobs have an answer."""
    begin = time.perf_counter()
    submitted = [
        client.submit(
            ChatRequest(
                model=MODEL,
                messages=[{"role": "user", "content": f"{turn}: count to {number}"}],
                max_tokens=TOKENS,
                ignore_eos=True,
            )
        )
        for number in range(jobs)
    ]
    for job in submitted:
        job.result(timeout=600)
    return time.perf_counter() - begin


@click.command()
@click.option("--jobs", default=500, show_default=True)
@click.option("--scrapes", default=1000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(jobs: int, scrapes: int, rounds: int) -> None:
    """Measure jobs with and without scrapes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(port=0) as server:
        words = ["work", "--model", MODEL, "--device", "cpu", "--http", str(port)]
        worker = subprocess.Popen(
            [COMMAND, *words, "--redis", server.url, "--results", f"{folder}/results"],
            stderr=subprocess.DEVNULL,
        )
        try:
            with Client(server.url) as client:
                wait_for_worker(client, worker, SECONDS)
                answer(client, jobs, "warm")
                expected = answer(client, jobs, "warm again")
                plain, scraped, taken = [], [], []
                for number in range(rounds):
                    plain.append(answer(client, jobs, f"plain {number}"))
                    with Scraper(port, scrapes, expected) as scraper:
                        scraped.append(answer(client, jobs, f"scraped {number}"))
                    taken += scraper.taken
                    print(
                        f"round {number}: {plain[-1]:.2f} s, scraped {scraped[-1]:.2f} s",
                        flush=True,
                    )
        finally:
            worker.terminate()
            worker.wait()
    without, beside = median(plain), median(scraped)
    print(
        f"{jobs} jobs: median {without:.2f} s, with {scrapes} scrapes {beside:.2f} s, ratio "
        f"{beside / without:.3f}; a scrape takes {median(taken) * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    main()
