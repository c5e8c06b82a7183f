"""Two models that do not fit into memory together: the planner of `chatjobs work --memory` beside
other policies, on a real queue.

    python -m bench.residency [--seconds 30] [--load 0.8]

Each row is a run: jobs of both models come at random times (Poisson), at a ratio. Backend and loads
are scripted, so that policies alone differ: a step takes 20 ms for 8 sequences, and a job 10 steps,
which is 40 jobs/s; a load takes as long as `--swap` says. Policies:

    planner  the one of the worker
    at-once  swaps for the first job of the other model
    fifo     keeps the model of the job that has waited longest over all queues
    collate  stays while there are jobs, without a bound (llama-swap)
    lru      one model by count, the least recently used one goes (Ollama, llama.cpp)
    two      two workers with a model each, and twice the device: not a policy, but the limit

jobs/s: jobs over the time until the last one has ended. Waits are seconds from submit to start.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from bench.serving import percentile
from jobs import ChatRequest, Client, Results
from jobs.api.job_options import JobOptions
from jobs.embedded import EmbeddedRedis
from worker.queue.model_state import State
from worker.residency import manager
from worker.residency.planner import ModelView, Plan, plan

RATIOS = ((1, 1), (4, 1), (16, 1))
STEP_SECONDS, BATCH, STEPS = 0.02, 8, 10
JOBS_PER_SECOND = BATCH / (STEP_SECONDS * STEPS)
BUDGET = 150  # for one of the backend's models
MODELS = ("one", "two")
START_SECONDS = 20.0

Policy = Callable[[Sequence[ModelView], int, float], Plan]


def at_once(models: Sequence[ModelView], budget: int, max_wait: float) -> Plan:
    """Swap for the oldest job of a model that is not in memory."""
    return _swap(models, budget, lambda wanted, resident: True)


def fifo(models: Sequence[ModelView], budget: int, max_wait: float) -> Plan:
    """Swap if the job that has waited longest is of another model."""
    return _swap(models, budget, lambda wanted, resident: wanted.oldest > resident.oldest)


def collate(models: Sequence[ModelView], budget: int, max_wait: float) -> Plan:
    """Swap when the model in memory has no jobs."""
    return _swap(models, budget, lambda wanted, resident: not resident.busy)


def lru(models: Sequence[ModelView], budget: int, max_wait: float) -> Plan:
    """Swap for a job of another model when the one in memory runs none."""
    return _swap(models, budget, lambda wanted, resident: not resident.running)


def _swap(
    models: Sequence[ModelView], budget: int, may: Callable[[ModelView, ModelView], bool]
) -> Plan:
    resident = next((one for one in models if one.state.resident), None)
    wanted = max(
        (one for one in models if not one.state.resident and one.queued),
        key=lambda one: one.oldest,
        default=None,
    )
    if wanted is None or (resident is not None and resident.state is State.LOADING):
        return Plan()
    if resident is None:
        return Plan(load=wanted.name, target=wanted.name)
    if resident.state is not State.DRAINING and not may(wanted, resident):
        return Plan()
    if resident.running:
        return Plan(drain=frozenset([resident.name]), target=wanted.name)
    return Plan((resident.name,), wanted.name, target=wanted.name)


POLICIES: dict[str, Policy] = {
    "planner": plan,
    "at-once": at_once,
    "fifo": fifo,
    "collate": collate,
    "lru": lru,
}


class Figures(NamedTuple):
    rate: float  # jobs/s
    median: float  # waits, seconds
    p95: float
    longest: float
    swaps: int


def run_worker(text: str) -> None:
    """A worker process; its options are JSON."""
    from tests.worker.fake_backend import FakeBackend
    from worker.model_spec import ModelSpec
    from worker.service import serve

    options = json.loads(text)
    budget = BUDGET if len(options["models"]) > 1 else None
    backend = FakeBackend(BATCH, STEP_SECONDS, budget=budget, load_seconds=options["swap"])
    with patch.object(manager, "plan", POLICIES[options["policy"]]):
        serve(
            backend,
            [ModelSpec(reference=name) for name in options["models"]],
            redis_url=options["url"],
            results=Path(options["results"]),
            max_wait=options["max_wait"],
            part_seconds=1.0,
        )
    print(json.dumps({"loads": len(backend.loaded)}))


def measure(policy: str, ratio: tuple[int, int], options: argparse.Namespace) -> Figures:
    """One run."""
    choose = random.Random(f"{options.seed} {ratio}")  # the same arrivals for each policy
    arrivals, moment = [], 0.0
    while (moment := moment + choose.expovariate(options.load * JOBS_PER_SECOND)) < options.seconds:
        arrivals.append((moment, choose.choices(MODELS, ratio)[0]))
    groups = [[name] for name in MODELS] if policy == "two" else [list(MODELS)]
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(port=0) as server:
        shared = {"url": server.url, "results": folder, "swap": options.swap}
        shared |= {"max_wait": options.max_wait, "policy": "planner" if policy == "two" else policy}
        workers = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    __spec__.name,
                    "--worker",
                    json.dumps(shared | {"models": names}),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for names in groups
        ]
        try:
            with Client(server.url) as client:
                client.serving = None
                warm = client.submit(_request(MODELS[0]))  # the worker has started
                warm.result(timeout=START_SECONDS)
                begin = time.monotonic()
                jobs = []
                for moment, name in arrivals:
                    time.sleep(max(0.0, begin + moment - time.monotonic()))
                    jobs.append(client.submit(_request(name, "bench")))
                for job in jobs:
                    job.result(timeout=600)
                seconds = time.monotonic() - begin
                client.run("bench").wait()
        finally:
            for worker in workers:
                worker.terminate()
            said = [json.loads(worker.communicate()[0] or '{"loads": 0}') for worker in workers]
        waits = Results(folder).table("bench", columns=["queue_s"]).column(0).to_pylist()
    return Figures(
        len(arrivals) / seconds,
        percentile(waits, 0.5),
        percentile(waits, 0.95),
        max(waits, default=inf),
        sum(one["loads"] for one in said) - 1,
    )


def _request(model: str, run: str | None = None) -> ChatRequest:
    return ChatRequest(
        model=model,
        messages=[{"role": "user", "content": "a"}],
        metadata={"words": str(STEPS)},
        job=JobOptions(run=run) if run else JobOptions(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals")
    parser.add_argument("--load", type=float, default=0.7, help="share of the device's jobs/s")
    parser.add_argument("--swap", type=float, default=0.5, help="seconds of a load")
    parser.add_argument("--max-wait", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policies", nargs="+", default=[*POLICIES, "two"])
    options = parser.parse_args()
    if options.worker:
        run_worker(options.worker)
        return
    print(f"{'ratio':6} {'policy':8} {'jobs/s':>7} {'p50':>7} {'p95':>7} {'max':>7} {'swaps':>6}")
    for ratio in RATIOS:
        for policy in options.policies:
            found = measure(policy, ratio, options)
            times = " ".join(f"{one:7.2f}" for one in found[1:4])
            name = f"{ratio[0]}:{ratio[1]}"
            print(f"{name:6} {policy:8} {found.rate:7.1f} {times} {found.swaps:6}", flush=True)


if __name__ == "__main__":
    main()
