"""Kill workers in the middle of session turns: each history then has every turn once, in order.

    python -m tests.soak.session_kills [--kills 200] [--seed N] [--server BINARY]

Ends with status 1 if a history is wrong.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from jobs import ChatRequest, Client, Session
from jobs.client.job import Job
from jobs.embedded import server_binary
from tests.servers import Server
from tests.soak.crew import Crew
from tests.soak.plan import WORKERS
from tests.soak.producers import MODELS
from tests.worker.fake_backend import text_of

SESSIONS, OPEN = 8, 3  # turns of each session that have not ended
WORDS = 150  # of an answer, at 5 ms each
PAUSE_SECONDS = 0.5  # between two kills
END_SECONDS = 120.0  # after the last kill, in which all turns end


@dataclass(slots=True)
class Talk:
    """A session and its turns, in the order of their submits."""

    session: Session
    model: str
    jobs: list[Job] = field(default_factory=list)
    ended: int = 0  # of the jobs, from the first one

    def question(self, number: int) -> str:
        return f"{self.session.id} {number}"

    def go_on(self) -> None:
        """Submit turns until OPEN of them have not ended."""
        while self.ended < len(self.jobs) and self.jobs[self.ended].status().over:
            self.ended += 1
        while len(self.jobs) - self.ended < OPEN:
            metadata = {"words": str(WORDS)}
            question = self.question(len(self.jobs))
            self.jobs.append(self.session.submit(question, wait=True, metadata=metadata))

    def problems(self) -> Iterator[str]:
        turns = self.session.turns()
        if [turn.job for turn in turns] != [job.id for job in self.jobs]:
            yield f"session {self.session.id} has not each of its {len(self.jobs)} turns once"
            return
        for number, turn in enumerate(turns):
            request = ChatRequest(
                model=self.model,
                messages=[{"role": "user", "content": self.question(number)}],
                metadata={"words": str(WORDS)},
            )
            if turn.answer["content"] != text_of(request):
                yield f"session {self.session.id} has a wrong answer in turn {number}"


@dataclass(slots=True)
class Outcome:
    kills: int = 0
    turns: int = 0
    turns_killed: int = 0
    problems: list[str] = field(default_factory=list)


def kill_workers(server: Server, folder: Path, *, kills: int, seed: int) -> Outcome:
    """Run sessions and kill workers that run their turns."""
    warnings.simplefilter("ignore")  # NobodyServes, while a worker is being replaced
    rng, outcome, over = random.Random(seed), Outcome(), threading.Event()
    crew = Crew(server.url, folder / "results")
    try:
        with Client(server.url) as client:
            talks = []
            for number in range(SESSIONS):
                model = MODELS[number % len(MODELS)]
                talks.append(Talk(client.session(f"s{number}", model=model), model))
            speaker = threading.Thread(target=_speak, args=(talks, over), daemon=True)
            speaker.start()
            while outcome.kills < kills:
                time.sleep(PAUSE_SECONDS * rng.random())
                for number in rng.sample(range(WORKERS), WORKERS):
                    jobs = crew.jobs_of(client.redis, number)
                    if jobs and not crew.runs_suspects(client.redis, number):
                        crew.send(number, signal.SIGKILL)
                        outcome.kills += 1
                        outcome.turns_killed += len(jobs)
                        break
            over.set()
            speaker.join(END_SECONDS)
            deadline = time.monotonic() + END_SECONDS
            for talk in talks:
                for job in talk.jobs[talk.ended :]:
                    job.result(timeout=max(1.0, deadline - time.monotonic()))
                outcome.turns += len(talk.jobs)
                outcome.problems += talk.problems()
            crew.finish()
            outcome.problems += crew.outputs
    finally:
        crew.kill()
    return outcome


def _speak(talks: list[Talk], over: threading.Event) -> None:
    while not over.wait(0.05):
        for talk in talks:
            talk.go_on()


@click.command()
@click.option("--kills", default=200, show_default=True)
@click.option("--seed", type=int, default=None, help="By default a new one.")
@click.option("--server", default=None, help="Binary of Redis or Valkey; else the first on PATH.")
def main(kills: int, seed: int | None, server: str | None) -> None:
    """Kill workers and say what did not hold."""
    seed = random.randrange(2**31) if seed is None else seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        running = Server(server or server_binary(), Path(folder) / "redis")
        running.start()
        try:
            outcome = kill_workers(running, Path(folder), kills=kills, seed=seed)
        finally:
            running.stop()
    print(f"kills: {outcome.kills}")
    print(f"attempts of turns that were killed: {outcome.turns_killed}")
    print(f"turns: {outcome.turns}")
    for problem in outcome.problems:
        print(f"PROBLEM: {problem}")
    sys.exit(1 if outcome.problems else 0)


if __name__ == "__main__":
    main()
