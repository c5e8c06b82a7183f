"""The gateway under load: open streams, the time that it adds, and its memory.

    python -m bench.gateway [--streams 500] [--rate 20] [--seconds 30] [--requests 100000]

One `chatjobs serve` on a private Redis. The worker is a process that writes to the streams what a
worker would, without a model. Four parts:

    load alone   the load generator reads such streams from a server that does nothing else: what it
                 can take, and its own CPU time
    streams      it reads them from the gateway: events that came, CPU seconds of the gateway per
                 second, and the age of events as they come
    first event  from the request to the first event, through the gateway and by a direct
                 subscriber, in turn
    memory       of the gateway, after a tenth of the requests and after all of them

Bars: 500 streams of 20 events a second with at most one CPU second per second; 5 ms added to the
first event at the median; as much memory after 100,000 requests as after 10,000.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click

from jobs import Client, keys
from jobs.api.answer import AssistantMessage, ChatCompletion, Choice, Usage, completion_id
from jobs.api.request import ChatRequest
from jobs.client.aio import AsyncClient
from jobs.embedded import EmbeddedRedis
from jobs.store.claimed_job import ClaimedJob
from jobs.store.connection.connect import connect
from jobs.store.stream import StreamWriter
from jobs.store.worker_status import WORKER, WorkerStatus
from jobs.stream.delta import Delta
from jobs.stream.entries import Entry
from jobs.testing.attempts import Attempts

MODEL = "none"
PAUSE = 0.001  # of the worker, if nothing is to be done
STATUS_SECONDS = 3600
EVENT = b"data: {"
SENT = re.compile(rb'"content":"([0-9.]+) ')  # when the worker has written an event
PATH = "/v1/chat/completions"
TICK = 1 / os.sysconf("SC_CLK_TCK")


# --- the worker -----------------------------------------------------------------------------------


@dataclass
class _Running:
    job: ClaimedJob
    words: int
    due: float  # of time.monotonic
    seq: int = 0
    text: str = ""


def work(url: str, rate: float) -> None:
    """Answer jobs: `words` of their metadata each `1 / rate` seconds, the first one at once. Of
    those that nobody follows, the answer alone."""
    redis = connect(url)
    attempts, writer = Attempts(redis), StreamWriter(redis)
    status: WorkerStatus = {
        "name": "bench",
        "host": "bench",
        "device": "none",
        "paused": "",
        "models": [MODEL],
        "names": [MODEL],
        "memory": {"weights": 0, "cache": 0},
        "running": 0,
        "tokens_per_second": 0.0,
    }
    redis.zadd(keys.WORKERS, {"bench": (time.time() + STATUS_SECONDS) * 1000})
    redis.set(keys.worker("bench"), WORKER.encode(status), ex=STATUS_SECONDS)
    running: list[_Running] = []
    while True:
        for job in attempts.claim():
            request = ChatRequest.parse(job.request)
            if request.publishes:
                words = int((request.metadata or {})["words"])
                running.append(_Running(job, words, time.monotonic()))
            else:
                attempts.finish(job, _answer(job, "ok"))
        now = time.monotonic()
        due = [one for one in running if one.due <= now]
        for one in due:
            one.seq += 1
            one.due += 1 / rate
        writer.write_many([_entry(one) for one in due])
        ended = [one for one in due if one.seq == one.words]
        for one in ended:
            attempts.finish(one.job, _answer(one.job, one.text))
            running.remove(one)
        attempts.take_rows()
        if not due:
            time.sleep(PAUSE)


def _entry(one: _Running) -> Entry:
    word, last = f"{time.time():.6f} ", one.seq == one.words
    one.text += word
    delta = Delta(0, content=word, finish_reason="stop" if last else None)
    return Entry(one.job.lease.job, one.job.lease.attempt, one.seq, (delta,))


def _answer(job: ClaimedJob, text: str) -> ChatCompletion:
    message = AssistantMessage(content=text)
    return ChatCompletion(
        id=completion_id(job.lease.job),
        created=int(time.time()),
        model=MODEL,
        choices=[Choice(index=0, message=message, finish_reason="stop")],
        usage=Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2),
    )


# --- the load -------------------------------------------------------------------------------------


@dataclass
class Load:
    """What a load generator has read of its streams. `ages`: seconds from the worker's write."""

    events: int = 0
    ages: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0  # seconds of the generator

    def take(self, part: bytes) -> None:
        found = part.count(EVENT)
        self.events += found
        if found and (sent := SENT.search(part)):
            self.ages.append(time.time() - float(sent[1]))


def body_of(words: int, *, stream: bool) -> bytes:
    request: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "stream": stream,
        "metadata": {"words": str(words)},
    }
    body = json.dumps(request).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def read_streams(port: int, streams: int, words: int, load: Load) -> None:
    """Open streams, and read all of them to their ends."""

    async def follow() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(body_of(words, stream=True))
        rest = b""
        while b"[DONE]" not in rest:
            part = await reader.read(65536)
            if not part:
                raise ConnectionError(f"a stream ended early: {rest[-500:]!r}")
            load.take(rest[-len(EVENT) + 1 :] + part if rest else part)
            rest = rest[-500:] + part
        writer.close()

    begin, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*(follow() for _ in range(streams)))
    load.seconds, load.cpu = time.monotonic() - begin, time.process_time() - cpu


async def serve_nothing(port: Any, words: int, rate: float) -> None:
    """A server that sends such events and does nothing else."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        due = time.monotonic()
        for _ in range(words):
            text = f'{{"id":"{"x" * 150}","delta":{{"content":"{time.time():.6f} "}}}}'
            writer.write(f"data: {text}\n\n".encode())
            due += 1 / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=2048)
    port.value = server.sockets[0].getsockname()[1]
    await server.serve_forever()


def run_nothing(port: Any, words: int, rate: float) -> None:
    asyncio.run(serve_nothing(port, words, rate))


async def first_events(url: str, port: int, count: int) -> dict[str, float]:
    """Median milliseconds to the first event, through the gateway and directly, in turn."""
    client = AsyncClient(url)
    found: dict[str, list[float]] = {"gateway": [], "direct": []}
    request = ChatRequest.parse(json.loads(body_of(1, stream=True).partition(b"\r\n\r\n")[2]))
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        begin = time.perf_counter()
        writer.write(body_of(1, stream=True))
        while EVENT not in await reader.readuntil(b"\n"):
            pass
        found["gateway"].append(time.perf_counter() - begin)
        writer.close()
        begin = time.perf_counter()
        job = await client.submit(request)
        async for _chunk in job.stream():
            found["direct"].append(time.perf_counter() - begin)
            break
    await client.close()
    through, direct = (1000 * median(found[name]) for name in ("gateway", "direct"))
    return {
        "through the gateway, p50, ms": through,
        "directly, p50, ms": direct,
        "added, ms": through - direct,
    }


async def send_requests(port: int, count: int, connections: int) -> None:
    """Requests that are not streamed, over some connections."""
    left = count
    sent = body_of(1, stream=False)

    async def ask() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while left > 0:
            left -= 1
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise ConnectionError(head.decode())
            (length,) = re.findall(rb"content-length: (\d+)", head)
            await reader.readexactly(int(length))
        writer.close()

    await asyncio.gather(*(ask() for _ in range(connections)))


# --- the gateway ----------------------------------------------------------------------------------


class Gateway:
    """`chatjobs serve` as a process."""

    def __init__(self, url: str) -> None:
        command = [str(Path(sys.executable).with_name("chatjobs")), "serve", "--port", "0"]
        self._process = subprocess.Popen(
            [*command, "--redis", url], stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        lines = iter(self._process.stderr.readline, "")
        self.port = next(int(found[1]) for one in lines if (found := re.search(r":(\d+)/v1", one)))

    @property
    def cpu(self) -> float:
        """Seconds of CPU time so far."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return TICK * (int(stat[11]) + int(stat[12]))

    @property
    def resident(self) -> float:
        """MiB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (found,) = re.findall(r"^VmRSS:\s+(\d+) kB", status, re.M)
        return int(found) / 1024

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[None]:
    """A process that is killed at the end."""
    started = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
    started.start()
    try:
        yield
    finally:
        started.kill()
        started.join()


def load_figures(load: Load, expected: int) -> dict[str, float]:
    centiles = quantiles(load.ages, n=100) if len(load.ages) > 1 else [0.0] * 99
    return {
        "events": load.events,
        "events expected, or more": expected,
        "events/s": load.events / load.seconds,
        "CPU seconds of the generator per second": load.cpu / load.seconds,
        "age of an event, p50, ms": 1000 * centiles[49],
        "age of an event, p99, ms": 1000 * centiles[98],
    }


def measure_alone(streams: int, words: int, rate: float) -> dict[str, float]:
    port = multiprocessing.get_context("spawn").Value("i", 0)
    with process(run_nothing, port, words, rate):
        while not port.value:
            time.sleep(0.05)
        load = Load()
        asyncio.run(read_streams(port.value, streams, words, load))
    return load_figures(load, streams * words)


def measure_streams(gateway: Gateway, streams: int, words: int) -> dict[str, float]:
    load, cpu = Load(), gateway.cpu
    asyncio.run(read_streams(gateway.port, streams, words, load))
    spent = (gateway.cpu - cpu) / load.seconds
    return {"CPU seconds of the gateway per second": spent, **load_figures(load, streams * words)}


def measure_memory(gateway: Gateway, requests: int, connections: int) -> dict[str, float]:
    asyncio.run(send_requests(gateway.port, requests // 10, connections))
    early, begin = gateway.resident, time.monotonic()
    asyncio.run(send_requests(gateway.port, requests - requests // 10, connections))
    rate = (requests - requests // 10) / (time.monotonic() - begin)
    return {
        "requests": requests,
        "requests/s": rate,
        "MiB after a tenth": early,
        "MiB after all": gateway.resident,
    }


@click.command()
@click.option("--streams", default=500, show_default=True)
@click.option("--rate", default=20.0, show_default=True, help="Events per second of a stream.")
@click.option("--seconds", default=30.0, show_default=True, help="Length of a stream.")
@click.option("--firsts", default=300, show_default=True, help="First events of each kind.")
@click.option("--requests", default=100_000, show_default=True)
@click.option("--connections", default=32, show_default=True, help="That send requests.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(
    streams: int,
    rate: float,
    seconds: float,
    firsts: int,
    requests: int,
    connections: int,
    out: Path | None,
) -> None:
    """Measure the gateway with many streams, its added time, and its memory."""
    words = max(1, round(rate * seconds))
    parts = {"load alone": measure_alone(streams, words, rate)}
    with EmbeddedRedis() as server, process(work, server.url, rate):
        client = Client(server.url)
        while not client.redis.exists(keys.worker("bench")):
            time.sleep(0.05)
        gateway = Gateway(server.url)
        try:
            parts["streams"] = measure_streams(gateway, streams, words)
            found = asyncio.run(first_events(server.url, gateway.port, firsts))
            parts["first event"] = found
            parts["memory"] = measure_memory(gateway, requests, connections)
        finally:
            gateway.stop()
            client.close()
    from bench.harness import report  # it imports torch, which the processes above do without

    rows = [
        {"part": part, "figure": name, "value": value}
        for part, figures in parts.items()
        for name, value in figures.items()
    ]
    report("gateway", rows, "cpu", out)


if __name__ == "__main__":
    main()
