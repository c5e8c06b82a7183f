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
from itertools import chain
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import redis

from bench.harness import MIB, report, resident_bytes
from jobs import keys
from jobs.embedded import EmbeddedRedis
from jobs.operations import CHAT
from jobs.results.files import SAMPLES, write_part
from jobs.results.rows import SCHEMA_VERSION
from jobs.results.schema import SCHEMA
from jobs.results.unfinished import TEMPORARY
from jobs.store.reservations import DIGEST_BYTES
from jobs.store.rq_layout import DATA, decode_call, job_key, queue_key

RUN = "bench"
MODEL = "none"
PART_ROWS = 5000
END_ROWS = 500  # in one script
LOOK_SECONDS = 0.5

# KEYS: hash of a job and hash of the reservation of its row, of each job. ARGV: bytes of a digest,
# then the field of each row.
END = """
for place = 2, #ARGV do
  local job, rows, field = KEYS[2 * place - 3], KEYS[2 * place - 2], ARGV[place]
  redis.call('HSET', job, 'status', 'finished')
  redis.call('HSET', rows, field, string.sub(redis.call('HGET', rows, field), 1, ARGV[1]))
end
"""


def write_rows(file: Path, count: int) -> None:
    with file.open("w") as opened:
        for number in range(count):
            row = {"prompt": f"What is {number} + {number + 1}?", "target": str(2 * number + 1)}
            opened.write(f"{json.dumps(row)}\n")


def part_of(ids: list[str], rows: list[int]) -> pa.Table:
    """A table of SCHEMA: rows without answers, by their jobs and indexes."""
    count = len(rows)
    constants = {
        **{"schema_version": SCHEMA_VERSION, "run_id": RUN, "model": MODEL, "request_hash": ""},
        **{"repeat_index": 0, "choice_index": 0, "attempt": 1},
        **{"operation": CHAT.name, "status": "ok"},
    }
    columns: dict[str, list[Any]] = {name: [value] * count for name, value in constants.items()}
    columns |= {"job_id": ids, "row_index": rows}
    arrays = [
        pa.array(columns[field.name], field.type)
        if field.name in columns
        else pa.nulls(count, field.type)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def drain(url: str, results: Path) -> None:
    """End all jobs that come: as in the store, the reservation says that the row is written."""
    client: Any = redis.Redis.from_url(url)
    end = client.register_script(END)
    queue = queue_key(keys.bulk_queue(MODEL))
    number = 0
    while True:
        ids = [one.decode() for one in client.lpop(queue, PART_ROWS) or ()]
        if not ids:
            time.sleep(0.01)
            continue
        reading = client.pipeline(transaction=False)
        for job_id in ids:
            reading.hget(job_key(job_id), DATA)
        rows = [decode_call(data).kwargs["request"]["job"]["row"] for data in reading.execute()]
        folder = results / RUN
        name = f"part-{number}.parquet"
        write_part(folder / TEMPORARY / name, folder / SAMPLES / name, part_of(ids, rows))
        names = [
            (job_key(job_id), keys.rows(RUN, row)) for job_id, row in zip(ids, rows, strict=True)
        ]
        fields = [keys.row_field(row, 0) for row in rows]
        for start in range(0, len(ids), END_ROWS):
            some = slice(start, start + END_ROWS)
            end(keys=[*chain.from_iterable(names[some])], args=[DIGEST_BYTES, *fields[some]])
        number += 1


def used_seconds(client: Any) -> float:
    """CPU time of Redis so far."""
    used = client.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


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
        since, used_before = time.perf_counter(), used_seconds(client)
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
        of_redis = used_seconds(client) - used_before
        worker.kill()
    half = len(peaks) // 2
    row = {
        "rows": count,
        "rows / s": count / seconds,
        "CPU of the producer, us / row": 1e6 * (spent.ru_utime + spent.ru_stime) / count,
        "of Redis, with the drain": 1e6 * of_redis / count,
        "producer MiB, first half": max(peaks[:half]) / MIB,
        "second half": max(peaks[half:]) / MIB,
        "Redis MiB, first half": max(used[:half]) / MIB,
        "second": max(used[half:]) / MIB,
    }
    report(f"Produce {count} rows with {window} in flight", [row], "cpu", out)


if __name__ == "__main__":
    main()
