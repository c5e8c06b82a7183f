"""Kill and freeze the parts of a run: each row is then in Parquet once, with the right answer.

    python -m tests.soak.run_kills [--rows 5000] [--faults 15] [--seed N] [--server BINARY]

Producer, worker, recorder and Redis are processes of their own. Each is killed and frozen so many
times, at random moments. The answers are those of an engine that nobody disturbs: greedy, in
float32. Ends with status 1 if something does not hold.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click
import pyarrow.parquet as pq
import redis

from jobs import ChatRequest, keys
from jobs.embedded import server_binary
from jobs.store.rq_layout import LOST, job_key
from tests.servers import Server
from worker import Engine
from worker.engine.slots import BATCH_PER_QUEUED, MOST_HALF_BATCHES
from worker.queue.reaper import SUSPECT_LOST

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("chatjobs")
RUN, MODEL = "r", "demo"
BATCH = 4  # of fake_worker.py
# Jobs that a worker has claimed at most.
CLAIMED = BATCH + BATCH // BATCH_PER_QUEUED * MOST_HALF_BATCHES
QUESTIONS = 40  # that differ
MAX_TOKENS = 16
WINDOW = 200
LEASE_SECONDS = 2.0  # also of the part of a recorder
FREEZE_SECONDS = (0.2, 1.5 * LEASE_SECONDS)  # some are longer than a lease
PAUSE_SECONDS = 0.1  # between two looks
STUCK_SECONDS = 300.0  # without a row that ends
RECORDER = """
import logging, sys
from pathlib import Path
from jobs import JobError
from jobs.record.process import record
logging.basicConfig(level=logging.INFO)
try:
    record(redis_url=sys.argv[0], results=Path(sys.argv[1]), part_seconds=1.0, plan_seconds=2.0)
except JobError as error:
    print(error)
    sys.exit(3)
"""


@dataclass(slots=True)
class Outcome:
    """kills, freezes: by part. regenerated: attempts at rows beyond the first of each."""

    kills: Counter[str] = field(default_factory=Counter)
    freezes: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    regenerated: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def allowed(self) -> int:
        """The most rows that may be generated again."""
        return (self.kills["worker"] + self.freezes["worker"]) * CLAIMED


class Part:
    """A process that is started again when it has ended, unless it is done. `log`: of its
    output."""

    def __init__(self, log: Path, *words: object) -> None:
        self._log, self._words = log, [str(word) for word in words]
        self.exits: list[int] = []
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self, seconds: float) -> int:
        return self._process.wait(seconds)

    def output(self) -> str:
        return self._log.read_text()


class Run:
    """One run of `rows`, with `faults` kills and as many freezes of each part."""

    def __init__(self, binary: str, folder: Path, *, rows: int, faults: int, seed: int) -> None:
        self._folder, self._rows, self._faults = folder, rows, faults
        self._draw, self._outcome = random.Random(seed), Outcome()
        self._results = folder / "results"
        self._questions = [f"What is {n} + {3 * n % 17}?" for n in range(min(QUESTIONS, rows))]
        self._server = Server(binary, folder / "redis", appendonly="yes")
        self._redis = self._server.client  # finds the server again after a restart
        self._read: set[Path] = set()
        self._written = 0

    def run(self) -> Outcome:
        begin = time.monotonic()
        self._server.start()
        parts: dict[str, Part] = {}
        try:
            parts |= self._start()
            self._disturb(parts)
            self._finish(parts)
            self._check()
        finally:
            for part in parts.values():
                part.kill()
            self._server.kill()
        self._outcome.seconds = time.monotonic() - begin
        return self._outcome

    def _start(self) -> dict[str, Part]:
        data = self._folder / "data.jsonl"
        prompts = (self._question(row) for row in range(self._rows))
        data.write_text("".join(f"{json.dumps({'prompt': one})}\n" for one in prompts))
        url, results = self._server.url, self._results
        worker = {
            "redis_url": url,
            "results": None,
            "real": True,
            "models": [MODEL],
            "lease_seconds": LEASE_SECONDS,
        }
        run = ["run", data, "-m", MODEL, "--run", RUN, "--window", WINDOW]
        run += [
            "--max-tokens",
            MAX_TOKENS,
            "-o",
            "temperature=0",
            "--redis",
            url,
            "--results",
            results,
        ]
        python = (sys.executable, "-m")
        return {
            "worker": self._part("worker", *python, "tests.worker.fake_worker", json.dumps(worker)),
            "recorder": self._part("recorder", *python, "tests.run_code", RECORDER, url, results),
            "producer": self._part("producer", COMMAND, *run),
        }

    def _part(self, name: str, *words: object) -> Part:
        return Part(self._folder / f"{name}.log", *words)

    def _question(self, row: int) -> str:
        return self._questions[row % len(self._questions)]

    def _disturb(self, parts: dict[str, Part]) -> None:
        """Inject each fault when about its share of the rows has ended."""
        names = [*parts, "redis"]
        faults = [(name, kind) for name in names for kind in ("kill", "freeze")] * self._faults
        self._draw.shuffle(faults)
        for number, (name, kind) in enumerate(faults):
            due = self._rows * 0.95 * (number + self._draw.random()) / len(faults)
            self._wait(parts, lambda due=due: self._ended() >= due)  # type: ignore[misc]
            if name == "worker":
                self._wait(parts, lambda: not self._runs_suspects())
            self._inject(parts, name, kind)

    def _inject(self, parts: dict[str, Part], name: str, kind: str) -> None:
        if kind == "kill":
            self._outcome.kills[name] += 1
            if name == "redis":
                self._server.kill()
                time.sleep(self._draw.uniform(0.0, 1.0))
                self._server.start()
            else:
                parts[name].kill()
                parts[name].start()
            return
        self._outcome.freezes[name] += 1
        one = self._server if name == "redis" else parts[name]
        one.send(signal.SIGSTOP)
        time.sleep(self._draw.uniform(*FREEZE_SECONDS))
        one.send(signal.SIGCONT)

    def _wait(self, parts: dict[str, Part], condition: Callable[[], bool]) -> None:
        """Until a condition holds; parts that have ended by themselves are started again, which
        they may if Redis was away when they started."""
        ended, since = -1, time.monotonic()
        while not condition():
            for name, part in parts.items():
                if part.code is not None:
                    assert part.code == 3, f"{name} has ended with {part.code}: {part.output()}"
                    part.start()
            now = self._ended()
            if now != ended:
                ended, since = now, time.monotonic()
            assert time.monotonic() - since < STUCK_SECONDS, f"{ended} rows have ended: stuck"
            time.sleep(PAUSE_SECONDS)

    def _ended(self) -> int:
        """Number of rows that are in files or in the outbox."""
        for file in set((self._results / RUN / "samples").glob("*.parquet")) - self._read:
            self._written += pq.read_metadata(file).num_rows
            self._read.add(file)
        try:
            return self._written + int(self._redis.xlen(keys.outbox(RUN)))
        except redis.RedisError:
            return self._written

    def _runs_suspects(self) -> bool:
        """True if one more death of the worker would rightly be blamed on a job."""
        client = self._redis
        for name in client.zrange(keys.WORKERS, 0, -1):
            for entry in client.zrange(keys.started(name.decode()), 0, -1):
                lost = client.hget(job_key(entry.decode().split(" ")[1]), LOST)
                if int(lost or 0) >= SUSPECT_LOST:
                    return True
        return False

    def _finish(self, parts: dict[str, Part]) -> None:
        producer = parts["producer"]
        others = {name: part for name, part in parts.items() if part is not producer}
        self._wait(others, lambda: producer.code is not None)
        audit = f"{RUN}: {self._rows:,} in, {self._rows:,} rows, 0 missing, 0 twice, 0 failed"
        if producer.code != 0 or audit not in producer.output():
            self._outcome.problems.append(
                f"the producer ended with {producer.code}: {producer.output()[-2000:]}"
            )
        for name, part in others.items():
            part.send(signal.SIGTERM)
            if (code := part.wait(STUCK_SECONDS)) != 0:
                self._outcome.problems.append(f"{name} ended with {code}: {part.output()[-2000:]}")

    def _check(self) -> None:
        """Read the files as any reader of Parquet does."""
        columns = ["row_index", "attempt", "text", "status"]
        files = (self._results / RUN / "samples").glob("*.parquet")
        rows = [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]
        outcome, expected = self._outcome, self._undisturbed()
        outcome.rows = len(rows)
        counts = Counter(row["row_index"] for row in rows)
        outcome.problems += [f"row {row} is there {n} times" for row, n in counts.items() if n > 1]
        missing = set(range(self._rows)) - counts.keys()
        outcome.problems += [f"row {row} is missing" for row in sorted(missing)]
        for row in rows:
            right = expected[self._question(row["row_index"])]
            if (row["status"], row["text"]) != ("ok", right):
                outcome.problems.append(f"{row}, and the answer is {right!r}")
        outcome.regenerated = sum(row["attempt"] - 1 for row in rows)
        if outcome.regenerated > outcome.allowed:
            outcome.problems.append(
                f"{outcome.regenerated} rows were generated again, and {outcome.allowed} may be"
            )
        for key in (keys.outbox(RUN), keys.parts(RUN), keys.OUTBOXES):
            if self._redis.exists(key):
                outcome.problems.append(f"{key} is left over")
        outcome.problems += [f"{file} is left over" for file in self._results.glob(f"{RUN}/_tmp/*")]

    def _undisturbed(self) -> dict[str, str | None]:
        """The answer to each question, of an engine in this process."""
        engine = Engine.load(MODEL, device="cpu", dtype="fp32", max_batch=BATCH)
        try:
            return {
                one: engine.chat(
                    ChatRequest(
                        model=MODEL,
                        messages=[{"role": "user", "content": one}],
                        temperature=0,
                        max_tokens=MAX_TOKENS,
                    )
                ).text
                for one in self._questions
            }
        finally:
            engine.close()


@click.command()
@click.option("--rows", default=5000, show_default=True)
@click.option("--faults", default=15, show_default=True, help="Kills, and freezes, of each part.")
@click.option("--seed", type=int, default=None, help="By default a new one.")
@click.option("--server", default=None, help="Binary of Redis or Valkey; else the first on PATH.")
def main(rows: int, faults: int, seed: int | None, server: str | None) -> None:
    """Kill and freeze the parts of a run, and say what did not hold."""
    seed = random.randrange(2**31) if seed is None else seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        outcome = Run(
            server or server_binary(), Path(folder), rows=rows, faults=faults, seed=seed
        ).run()
    for name in ("producer", "worker", "recorder", "redis"):
        print(f"{name}: {outcome.kills[name]} kills, {outcome.freezes[name]} freezes")
    print(f"rows: {outcome.rows}, in {outcome.seconds:.0f} s")
    print(f"generated again: {outcome.regenerated}, at most {outcome.allowed}")
    for problem in outcome.problems:
        print(f"PROBLEM: {problem}")
    sys.exit(1 if outcome.problems else 0)


if __name__ == "__main__":
    main()
