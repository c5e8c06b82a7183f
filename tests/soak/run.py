"""A soak: random producers, workers and followers under a seeded plan of faults.

    python -m tests.soak.run [--seconds 1200] [--jobs 3000] [--seed N] [--server BINARY]

Prints the seed, the faults and the counts; ends with status 1 if a guarantee did not hold.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import click
import redis

from jobs import Client, Results
from jobs.embedded import server_binary
from tests.soak import checks
from tests.soak.checks import Outcome
from tests.soak.conversations import check_conversations
from tests.soak.crew import Crew, may_kill
from tests.soak.followers import Followers
from tests.soak.ledger import Ledger
from tests.soak.plan import ROUND, WORKERS, Fault, Planned, rounds
from tests.soak.producers import Producer
from tests.soak.redis_pair import RedisPair

PRODUCERS = 6
END_SECONDS = 300.0  # after the last fault, in which all jobs end
SAMPLE_SECONDS = 0.5  # between two looks at the memory


class Soak:
    """One soak in a folder. `run` returns its outcome."""

    def __init__(self, binary: str, folder: Path, *, seed: int, jobs: int, seconds: float) -> None:
        self._seed, self._seconds = seed, seconds
        self._began = time.monotonic()
        self._ledger = Ledger()
        self._pair = RedisPair(binary, folder)
        self._results = Results(folder / "results")
        self._crew = Crew(self._pair.url, folder / "results")
        self._followers = Followers(self._pair.url)
        self._producers = [
            Producer(
                self._pair.url,
                self._ledger,
                number,
                seed,
                jobs // PRODUCERS,
                seconds,
                self._followers.follow,
            )
            for number in range(PRODUCERS)
        ]
        self._over = threading.Event()

    def run(self) -> Outcome:
        threading.Thread(target=self._sample, name="memory", daemon=True).start()
        for producer in self._producers:
            producer.start()
        self._make_faults()
        outcome = Outcome()
        self._wait_for_ends(outcome)
        self._followers.end(END_SECONDS)
        outcome.problems += [f"a stream has not ended: {one}" for one in self._followers.unfinished]
        self._crew.finish()
        self._over.set()
        self._check(outcome)
        return outcome

    def close(self) -> None:
        self._over.set()
        self._crew.kill()
        self._pair.close()

    def _make_faults(self) -> None:
        """Whole rounds of the plan until the time is over, at least one."""
        until = time.monotonic() + self._seconds
        for faults in rounds(self._seed):
            for planned in faults:
                if time.monotonic() >= until and len(self._ledger.faults) == len(ROUND):
                    return
                time.sleep(planned.pause)
                self._make(planned)

    def _make(self, planned: Planned) -> None:
        fault, seconds, worker = planned.fault, planned.seconds, planned.worker
        if fault in (Fault.KILL, Fault.FREEZE):
            numbers = [(worker + i) % WORKERS for i in range(WORKERS)]
            spared = [one for one in numbers if may_kill(self._crew, self._pair.url, one)]
            if not spared:
                return
            worker = spared[0]
        print(f"  {fault} ({seconds:.1f} s)", file=sys.stderr, flush=True)
        self._ledger.faults[fault] += 1
        match fault:
            case Fault.KILL:
                self._crew.send(worker, signal.SIGKILL)
            case Fault.FREEZE:
                self._crew.freeze(worker, seconds)
            case Fault.STOP:
                self._crew.send(worker, signal.SIGTERM)
            case Fault.RESTART | Fault.OUTAGE:
                self._pair.restart(seconds)
            case Fault.SILENCE:
                self._pair.silence(seconds)
            case Fault.POWER_CUT:
                self._pair.cut_power(seconds)
            case Fault.FAIL_OVER:
                self._pair.fail_over(seconds)
            case Fault.FULL_REDIS:
                self._pair.fill(seconds, below=worker == 0)
            case Fault.FULL_DISK:
                self._crew.fill_disk(seconds)
            case Fault.DROP:
                self._pair.address.drop()

    def _wait_for_ends(self, outcome: Outcome) -> None:
        deadline = time.monotonic() + END_SECONDS
        for producer in self._producers:
            producer.join(max(0.0, deadline - time.monotonic()))
            if producer.is_alive() or producer.error:
                outcome.problems.append(f"{producer.name} has not ended well: {producer.error!r}")
        with Client(self._pair.url) as client:
            while left := checks.unsettled(client, self._ledger.confirmed()):
                if time.monotonic() > deadline:
                    outcome.problems.append(f"{len(left)} jobs have not ended: {left[:10]}")
                    return
                time.sleep(0.5)

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            try:
                used = int(self._pair.info("memory")["used_memory"])
            except redis.RedisError:
                continue
            self._ledger.peak_memory = max(self._ledger.peak_memory, used)

    def _check(self, outcome: Outcome) -> None:
        ledger, crew, losses = self._ledger, self._crew, self._pair.losses
        rows = checks.read_rows(self._results)
        confirmed = ledger.confirmed()
        lost = [job for job in confirmed if job.id not in rows]
        ends = Counter(mine[0]["error_type"] or "ok" for mine in rows.values())
        attempts = [max(row["attempt"] or 1 for row in mine) for mine in rows.values()]
        outcome.counts |= {
            "seconds": round(time.monotonic() - self._began),
            **{str(fault): ledger.faults[fault] for fault in Fault},
            "exit codes of workers": dict(sorted(crew.exits.items())),
            "submits refused": dict(ledger.refusals),
            "jobs": len(confirmed),
            "of these, durable": sum(job.durable for job in confirmed),
            "lost": sum(not checks.may_be_lost(job, losses) for job in lost),
            "not durable, and forgotten by Redis": sum(
                checks.may_be_lost(job, losses) for job in lost
            ),
            "ends": dict(ends),
            "jobs that ran more than once": sum(attempt > 1 for attempt in attempts),
            "rows": sum(map(len, rows.values())),
            "rows of older attempts": checks.older_rows(self._results, rows),
            "streams whole": sum(job.stream == "whole" for job in confirmed),
            "streams that were reset": self._followers.resets,
            "peak of Redis's memory, MiB": round(ledger.peak_memory / 2**20, 1),
        }
        outcome.problems += crew.outputs
        outcome.problems += checks.check_jobs(ledger, rows, losses)
        outcome.problems += checks.check_rows(self._results, rows)
        with Client(self._pair.url) as client:
            conversations = [one for producer in self._producers for one in producer.conversations]
            outcome.problems += check_conversations(
                client, conversations, rows, losses, outcome.counts
            )
            outcome.problems += checks.check_redis(client, ledger, outcome.counts)


@click.command()
@click.option("--seconds", default=1200.0, show_default=True, help="Time in which faults happen.")
@click.option("--jobs", default=3000, show_default=True)
@click.option("--seed", type=int, default=None, help="Of the plan; by default a new one.")
@click.option("--server", default=None, help="Binary of Redis or Valkey; else the first on PATH.")
def main(seconds: float, jobs: int, seed: int | None, server: str | None) -> None:
    """Run a soak, print its counts, and say what did not hold."""
    seed = random.randrange(2**31) if seed is None else seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(server or server_binary(), Path(folder), seed=seed, jobs=jobs, seconds=seconds)
        try:
            outcome = soak.run()
        finally:
            soak.close()
    for name, value in outcome.counts.items():
        print(f"{name}: {value}")
    for problem in outcome.problems:
        print(f"PROBLEM: {problem}")
    sys.exit(1 if outcome.problems else 0)


if __name__ == "__main__":
    main()
