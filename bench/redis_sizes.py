"""The memory that Redis needs for jobs, their streams and their rows, and that of a worker.

    python -m bench.redis_sizes

A private server with the settings of deploy/redis/chatjobs.conf, and one worker with the demo model
that writes no rows. Bytes are the growth of used_memory by the number of jobs, and those of a
stream or an outbox what MEMORY USAGE says of its key. Only those of a stream depend on the speed of
the machine: the tokens of 20 ms share an entry.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from bench.harness import wait_for_worker
from jobs import Client, keys
from jobs.embedded import EmbeddedRedis
from jobs.sizes import size_text
from jobs.store.worker_status import read_workers

SECONDS = 600.0  # time limit of the worker's start and of the jobs
LENGTHS = (1_000, 10_000, 100_000)  # characters of a prompt
JOBS = 500
TOKENS = 200


def prompt(length: int, seed: int) -> str:
    """Text of words that differ from those of other prompts, compressed about as English is."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(length)]
    return " ".join(words)[:length]


def request(length: int, row: int, priority: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": prompt(length, row)}]
    job = {"run": "r", "row": row, "priority": priority}
    return {"model": "demo", "messages": messages, "job": job, **fields}


def waiting(client: Client, length: int) -> float:
    """Bytes of a job that waits in a run."""
    redis: Any = client.redis
    redis.flushall()
    before = int(redis.info("memory")["used_memory"])
    count = max(JOBS // (1 + length // 10_000), 20)
    client.submit_many([request(length, n, "bulk") for n in range(count)])
    return (int(redis.info("memory")["used_memory"]) - before) / count


@click.command()
def main() -> None:
    """Print the bytes of jobs, streams and rows, and the memory of a worker."""
    with EmbeddedRedis() as server, Client(server.url) as client:
        redis: Any = client.redis
        waiting(client, 1_000)  # what a server allocates once
        for length in LENGTHS:
            print(f"waiting job, prompt of {length:,} characters: {waiting(client, length):,.0f} B")
        redis.flushall()
        words = ["work", "--model", "demo", "--no-record", "-q", "--redis", server.url]
        worker = subprocess.Popen([str(Path(sys.executable).with_name("chatjobs")), *words])
        try:
            wait_for_worker(client, worker, SECONDS)
            rss = read_workers(redis)[0].get("rss", 0)
            print(f"worker, demo model, idle: {size_text(rss)}")
            jobs = client.submit_many(
                [
                    request(100, n, "interactive", max_tokens=TOKENS, ignore_eos=True)
                    for n in range(20)
                ]
            )
            client.gather(jobs, timeout=SECONDS)
            used = [redis.memory_usage(keys.log(job.id), samples=0) for job in jobs]
            each = sum(used) / len(used)
            print(f"stream of {TOKENS} tokens: {each:,.0f} B, {each / TOKENS:.0f} B a token")
            rows = redis.memory_usage(keys.outbox("r"), samples=0) / len(jobs)
            print(f"row of {TOKENS} tokens in the outbox: {rows:,.0f} B")
            rss = read_workers(redis)[0].get("rss", 0)
            print(f"worker, demo model, after jobs: {size_text(rss)}")
        finally:
            worker.terminate()
            worker.wait()


if __name__ == "__main__":
    main()
