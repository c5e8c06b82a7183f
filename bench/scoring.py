"""Cost of the producer of a run: rows per second, and memory of the producer and of Redis.

    python -m bench.scoring [--rows 1000000] [--window 2000]

`chatjobs run` reads synthetic rows and enqueues them, while a drain stands in for the workers: it
takes the jobs from the queue, ends them and writes their rows, in a process of its own and without
a model. Memory is looked at while the run goes on: flat means that the second half needs no more
than the first.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import redis

from bench.harness import MIB, report, resident_bytes
from jobs import keys
from jobs.embedded import EmbeddedRedis
from jobs.operations import CHAT, rows_of
from jobs.results.files import SAMPLES, TEMPORARY, table_of, write_part
from jobs.results.outbox import outbox_entry
from jobs.store.reservations import DIGEST_BYTES
from jobs.store.rq_layout import DATA, decode_call, job_key, queue_key

RUN = "bench"
MODEL = "none"
PART_ROWS = 5000
LOOK_SECONDS = 0.5


def write_rows(file: Path, count: int) -> None:
    with file.open("w") as opened:
        for number in range(count):
            row = {"prompt": f"What is {number} + {number + 1}?", "target": str(2 * number + 1)}
            opened.write(f"{json.dumps(row)}\n")


def drain(url: str, results: Path) -> None:
    """End all jobs that come: as in the store, the reservation says that the row is written."""
    client: Any = redis.Redis.from_url(url)
    queue = queue_key(keys.bulk_queue(MODEL))
    number = 0
    while True:
        ids = client.lpop(queue, PART_ROWS)
        if not ids:
            time.sleep(0.01)
            continue
        reading = client.pipeline(transaction=False)
        for job_id in ids:
            reading.hget(job_key(job_id.decode()), DATA)
        rows = []
        ending = client.pipeline(transaction=False)
        for job_id, data in zip(ids, reading.execute(), strict=True):
            request = decode_call(data).kwargs["request"]
            row = request["job"]["row"]
            entry = outbox_entry(job_id.decode(), request, "ok", operation=CHAT.name, attempt=1)
            rows += rows_of(entry)
            ending.hset(job_key(job_id.decode()), "status", "finished")
            ending.eval(
                "redis.call('HSET', KEYS[1], ARGV[1], string.sub("
                "redis.call('HGET', KEYS[1], ARGV[1]), 1, ARGV[2]))",
                1,
                keys.rows(RUN, row),
                keys.row_field(row, 0),
                DIGEST_BYTES,
            )
        folder = results / RUN
        name = f"part-{number}.parquet"
        write_part(folder / TEMPORARY / name, folder / SAMPLES / name, table_of(rows))
        ending.execute()
        number += 1


@click.command()
@click.option("--rows", "count", default=1_000_000, show_default=True)
@click.option("--window", default=2000, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(count: int, window: int, out: Path | None) -> None:
    """Measure rows per second and memory."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedRedis(port=0) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        data, results = Path(folder, "data.jsonl"), Path(folder, "results")
        write_rows(data, count)
        worker = multiprocessing.get_context("spawn").Process(
            target=drain, args=(server.url, results), daemon=True
        )
        worker.start()
        since = time.perf_counter()
        words = ["run", str(data), "-m", MODEL, "--run", RUN, "--window", str(window), "-q"]
        words += ["--redis", server.url, "--results", str(results)]
        producer = subprocess.Popen([Path(sys.executable).with_name("chatjobs"), *words])
        peaks, used, begun = [], [], None
        while producer.poll() is None:
            time.sleep(LOOK_SECONDS)
            try:
                resident = resident_bytes(producer.pid).get("VmRSS", 0)
            except FileNotFoundError:
                break
            if begun is None and (results / RUN / SAMPLES).is_dir():
                begun = time.perf_counter()
            if begun is not None and resident:
                peaks.append(resident)
                memory: Any = client.info("memory")
                used.append(memory["used_memory"])
        assert producer.wait() == 0
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)  # the producer alone has ended
        seconds = time.perf_counter() - (begun or since)
        worker.kill()
    half = len(peaks) // 2
    row = {
        "rows": count,
        "rows / s of CPU": count / (spent.ru_utime + spent.ru_stime),
        "rows / s": count / seconds,
        "producer MiB, first half": max(peaks[:half]) / MIB,
        "second half": max(peaks[half:]) / MIB,
        "Redis MiB, first half": max(used[:half]) / MIB,
        "second": max(used[half:]) / MIB,
    }
    report(f"Produce {count} rows with {window} in flight", [row], "cpu", out)


if __name__ == "__main__":
    main()
