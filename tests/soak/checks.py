"""The invariants that hold after a soak. Each check returns a sentence for each violation."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow.parquet as pq

from jobs import Client, Results, keys
from jobs.store.rq_layout import job_key
from tests.soak.ledger import Ledger, Submitted

MEMORY_BASE, MEMORY_PER_JOB = 32 * 2**20, 16 * 2**10  # bytes of Redis, with token logs
KEYS_BASE, KEYS_PER_JOB = 100, 4
OF_JOBS = re.compile(r"rq:(job|results):|chatjobs:\{")  # keys that expire with their job
OF_RUNS = re.compile(r"chatjobs:rows:")  # keys that expire with their run
LASTING = re.compile(
    r"rq:(queues|workers|finished|failed|canceled|clean_registries)|chatjobs:results$"
    r"|chatjobs:(wake|worker):|rq:worker"
)


@dataclass(slots=True)
class Outcome:
    """Of a soak: counts for the report, and what does not hold."""

    counts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_rows(results: Results) -> dict[str, list[dict[str, Any]]]:
    """The rows of each job."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in results.runs():
        for row in results.table(run).to_pylist():
            rows[row["job_id"]].append(row)
    return rows


def check_jobs(
    ledger: Ledger, rows: dict[str, list[dict[str, Any]]], losses: list[tuple[float, float]]
) -> Iterator[str]:
    """No confirmed job is lost, each one ends as it should, and its stream was whole."""
    for job in ledger.confirmed():
        mine = rows.get(job.id)
        if not mine:
            if not may_be_lost(job, losses):
                yield f"job {job.id} is lost (durable: {job.durable}, {_distance(job, losses)})"
        else:
            yield from _check_end(job, mine)
    for job_id in rows.keys() - ledger.jobs.keys():
        yield f"there is a row of job {job_id}, which nobody has submitted"


def may_be_lost(job: Submitted, losses: list[tuple[float, float]]) -> bool:
    """True if Redis may have forgotten a job: it was not durable when Redis lost writes. The reply
    to a submit may arrive after the loss of what it confirms."""
    end = job.confirmed_at or 0.0
    return not job.durable and any(
        since <= end and job.submitted_at <= until for since, until in losses
    )


def _distance(job: Submitted, losses: list[tuple[float, float]]) -> str:
    """When a job was confirmed, relative to the last loss of writes before that."""
    end = job.confirmed_at or 0.0
    before = [until for since, until in losses if since <= end]
    return f"confirmed {end - before[-1]:.2f} s after a loss" if before else "before any loss"


def _check_end(job: Submitted, rows: list[dict[str, Any]]) -> Iterator[str]:
    errors = {row["error_type"] for row in rows}
    if errors == {None}:
        texts = {row["choice_index"]: row["text"] for row in rows}
        if texts != job.texts or job.fails_with:
            expected = job.fails_with or job.texts
            yield f"job {job.id} has the rows {texts}, and should have {expected}"
    elif errors != {job.fails_with} and not (errors == {"cancelled"} and job.cancelled):
        yield f"job {job.id} failed: {rows[0]['error_type']}: {rows[0]['error_message']}"
    if job.stream not in ("whole", *errors) and not (job.stream == "cancelled" and job.cancelled):
        yield f"the stream of job {job.id} was {job.stream}; errors of its rows: {errors}"


def check_rows(results: Results, rows: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """One row per key, also in the files, and no file is incomplete."""
    names = ("run_id", "row_index", "repeat_index", "choice_index")
    seen = Counter(tuple(row[name] for name in names) for mine in rows.values() for row in mine)
    for key, count in seen.items():
        if count > 1:
            yield f"{count} rows have the key {key}"
    if older := older_rows(results, rows):
        yield f"{older} rows in the files are of older attempts, and nothing was requeued"
    for run in results.runs():
        yield from (f"{file} is broken: {why}" for file, why in results.broken(run).items())
    yield from (f"{file} is left over" for file in results.root.glob("*/_tmp/*"))


def older_rows(results: Results, rows: dict[str, list[dict[str, Any]]]) -> int:
    """The number of rows in the files that `Results` drops, because they are of older attempts."""
    files = [file for run in results.runs() for file in results.files(run)]
    return sum(pq.read_metadata(file).num_rows for file in files) - sum(map(len, rows.values()))


def check_redis(client: Client, ledger: Ledger, counts: dict[str, Any]) -> Iterator[str]:
    """Redis holds what ended jobs leave, for a time, and nothing else."""
    server: Any = client.redis
    names = [name.decode() for name in server.scan_iter(count=1000)]
    used, jobs = int(server.info("memory")["used_memory"]), len(ledger.jobs)
    counts |= {"keys at the end": len(names), "memory at the end, MiB": round(used / 2**20, 1)}
    for name in names:
        if OF_JOBS.match(name) or OF_RUNS.match(name):
            if server.ttl(name) == -1:
                yield f"{name} does not expire: {_content(server, name)}"
        elif not LASTING.match(name) and not _is_empty(server, name):
            yield f"{name} is left over"
    for workers in (keys.WORKERS, keys.STOPPING, "rq:workers"):
        if server.exists(workers):
            yield f"{workers} is left over"
    if len(names) > KEYS_BASE + KEYS_PER_JOB * jobs:
        yield f"{len(names)} keys are left of {jobs} jobs"
    if ledger.peak_memory > MEMORY_BASE + MEMORY_PER_JOB * jobs:
        yield f"Redis used {ledger.peak_memory / 2**20:.0f} MiB for {jobs} jobs"


def _content(server: Any, name: str) -> str:
    """The value of a key, without the request."""
    if server.type(name) != b"hash":
        return str(server.type(name))
    return str({field: value for field, value in server.hgetall(name).items() if field != b"data"})


def _is_empty(server: Any, name: str) -> bool:
    """True if a hash holds counts that are all 0, such as the bytes of the open requests."""
    return server.type(name) == b"hash" and {int(n) for n in server.hvals(name)} == {0}


def unsettled(client: Client, jobs: list[Submitted]) -> list[str]:
    """The jobs that Redis knows and that have not ended."""
    server: Any = client.redis
    pipeline = server.pipeline(transaction=False)
    for job in jobs:
        pipeline.hget(job_key(job.id), "status")
    open_ = (b"queued", b"started", b"deferred", b"scheduled")
    return [job.id for job, found in zip(jobs, pipeline.execute(), strict=True) if found in open_]
