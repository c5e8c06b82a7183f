"""One worker process: loads models, wires loop, residency and recorder, owns start and shutdown."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import redis

from jobs.errors import JobError, invalid
from jobs.record.folder import claim_folder
from jobs.record.last_rows import write_last_rows
from jobs.record.recorder import PART_SECONDS, Recorder
from jobs.signals import StopSignals
from jobs.store.connection.connect import check_server, connect, redis_failure
from jobs.store.control import Control
from jobs.store.eviction import check_eviction
from jobs.store.job_store import JobStore
from jobs.store.operator import Answers
from jobs.store.presence import Presence
from jobs.store.rights import check_rights
from jobs.store.stream import StreamWriter
from jobs.store.waiting import read_waiting
from jobs.store.wake_lists import WakeLists
from jobs.store.worker_status import ResultsStatus
from jobs.store.workers import Workers, worker_key
from jobs.tracing import open_tracing
from worker.backend import Backend, ModelInfo, SwappingBackend, TokenizingBackend
from worker.model_spec import ModelSpec
from worker.monitoring.monitor import Monitor
from worker.monitoring.readiness import Readiness
from worker.monitoring.sources import Sources
from worker.option_values import GRACE_SECONDS
from worker.queue.admission import Admission
from worker.queue.attempt import SettlementBuilder
from worker.queue.attempts import Attempts
from worker.queue.circuit_breaker import CircuitBreaker
from worker.queue.claim_commands import ClaimCommands
from worker.queue.claimer import Claimer
from worker.queue.job_figures import JobFigures
from worker.queue.job_spans import JobSpans
from worker.queue.lease_keeper import RENEWALS_PER_LEASE, LeaseKeeper
from worker.queue.load_figures import LoadFigures
from worker.queue.loading import Loading
from worker.queue.loop import LEASE_SECONDS, WorkerLoop
from worker.queue.membership import Membership
from worker.queue.operator_commands import OperatorCommands
from worker.queue.outage import waited_for
from worker.queue.publisher import Publisher
from worker.queue.reaper import Reaper
from worker.queue.served import Served
from worker.queue.stages import Stages
from worker.queue.status_collector import StatusCollector
from worker.queue.tokenizer_publisher import TokenizerPublisher
from worker.queue.waker import Waker
from worker.queue.watchdog import Watchdog
from worker.residency.budget import share_out, size
from worker.residency.commands import ModelCommands
from worker.residency.manager import MAX_WAIT, Residency
from worker.residency.model import Model, first_models
from worker.residency.other_workers import OtherWorkers
from worker.residency.policy import ResidencyPolicy
from worker.residency.pull_command import PullCommand

logger = logging.getLogger(__name__)

HANG_SECONDS = 120.0  # a worker that makes no progress with its work for this long is hung
PLAN_LEASES = 2.5  # a recorder holds the plan of a part for this many worker leases


def serve(
    backend: Backend,
    specs: Sequence[ModelSpec],
    *,
    redis_url: str | None = None,
    results: Path | None,
    grace: float = GRACE_SECONDS,
    burst: bool = False,
    lease_seconds: float = LEASE_SECONDS,
    hang_seconds: float = HANG_SECONDS,
    part_seconds: float = PART_SECONDS,
    http: tuple[str, int] | None = None,
    policies: Mapping[str, ResidencyPolicy] | None = None,
    max_wait: float = MAX_WAIT,
) -> None:
    """Serve the models' queues until SIGTERM or SIGINT; with `burst`, until no job is queued or
    started by any worker.

    results: folder of the rows; None leaves them to other workers. grace: seconds that running
    jobs get after the first signal. A worker that does not renew its lease for lease_seconds loses
    its jobs to others. http: host and port of probes and metrics. policies: by the references of
    the models, how they come and go under the backend's budget; without a budget all models stay in
    memory. max_wait: see the planner. Runs on the main thread. Raises JobError.
    """
    client = connect(redis_url)
    monitor = Monitor(http, redis_url)
    try:
        monitor.start()
        check_server(client)
        check_eviction(client)
        check_rights(client)
        folder = None if results is None else claim_folder(client, results)
        name = f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(3)}"
        patience = lease_seconds / RENEWALS_PER_LEASE
        # With a short lease, the start waits for a slow server as long as with the default one.
        at_start = max(patience, LEASE_SECONDS / RENEWALS_PER_LEASE)
        lease = Workers(redis_url, name, (), at_start)
        managed = _managed(backend, specs, policies or {})
        first = list(specs)
        if managed is not None:
            chosen = first_models(managed.models, managed.budget)
            first = [one.spec for one in chosen]
            for one in chosen:
                managed.backend.reserve(one.spec, one.share.reservation)
        references = [spec.reference for spec in first]
        with Loading(client, lease, references, backend.memory(), lease_seconds):
            models = _load(backend, first)
        tracing = open_tracing()
        recorder = folder and Recorder(
            connect(redis_url),
            folder,
            name=name,
            idle=lambda: not (backend.health().running or backend.health().waiting),
            part_seconds=part_seconds,
            plan_seconds=PLAN_LEASES * lease_seconds,
            tracing=tracing,
        )
        served = Served()
        for one in managed.models if managed else ():
            served.register(one.name, (one.spec.reference, *one.spec.aliases))
        for (model, _), spec in zip(models, first, strict=True):
            served.add(model, spec.aliases)
        by_name = {model.name: spec for (model, _), spec in zip(models, first, strict=True)}
        by_name |= {one.name: one.spec for one in managed.models} if managed else {}
        store = JobStore(client, served, name, worker_key(name), backend.funcs)
        # RQ's worker sends commands. As during the load, a signal ends the process meanwhile.
        presence = waited_for(partial(Presence, client, store.queues, name, lease_seconds))
        workers = Workers(redis_url, name, store.queues, patience)
        settlements = SettlementBuilder(name, socket.gethostname(), served.provenance)
        publisher = Publisher(StreamWriter(client))
        tokenizers: TokenizerPublisher | None = None
        if isinstance(backend, TokenizingBackend):
            tokenizers = TokenizerPublisher(connect(redis_url), backend, served)
        watchdog = Watchdog(backend, hang_seconds)
        breaker, figures = CircuitBreaker(), JobFigures()
        own_connection = Workers(redis_url, name, store.queues, patience)
        keeper = LeaseKeeper(own_connection, watchdog, lease_seconds, hang_seconds)
        residency: Residency | None = None
        spans = None if tracing is None else JobSpans(tracing, name)
        attempts = Attempts(backend, served, store, publisher, settlements, breaker, figures, spans)
        admission = Admission(
            presence, store, lease_seconds, obstacle=lambda: backend.health().obstacle
        )
        claimer = Claimer(
            backend,
            served,
            store,
            workers,
            attempts,
            admission,
            breaker,
            watchdog,
            partial(Waker, WakeLists(connect(redis_url), client)),
            lease_seconds=lease_seconds,
            burst=burst,
            others_wait=lambda: residency is not None and residency.waits(),
        )
        if managed is not None:
            residency = Residency(
                managed.backend,
                served,
                managed.models,
                managed.budget,
                partial(read_waiting, client),
                attempts,
                OtherWorkers(client, workers, lease_seconds),
                max_wait=max_wait,
                paused=lambda: bool(claimer.pause or claimer.sick),
                on_ready=claimer.claim_soon,
                wake=attempts.wake,
            )
            for model, seconds in models:
                residency.loaded(model.name, model, seconds)
        loads = residency.figures if residency else partial(LoadFigures, loads=len(models))

        def recording() -> ResultsStatus | None:
            return recorder.state if recorder else None

        loop = WorkerLoop(
            store,
            attempts,
            claimer,
            Membership(presence, workers, keeper),
            Reaper(store, workers, settlements, lease_seconds),
            Control(client, presence.control_channel),
            OperatorCommands(
                Answers(client),
                {
                    **ClaimCommands(admission, attempts).handlers,
                    **ModelCommands(residency).handlers,
                    **PullCommand(served, by_name).handlers,
                },
            ),
            StatusCollector(
                backend,
                served,
                recording,
                residency.status if residency else None,
                tokenizers.fingerprints if tokenizers else dict,
            ),
            watchdog,
            Stages(client, store.queues),
            lease_seconds=lease_seconds,
            grace=grace,
            on_idle=recorder.wake if recorder else lambda: None,
            residency=residency,
        )
        if recorder:
            waited_for(recorder.start)
        with StopSignals(loop, "its jobs go to other workers when its lease expires"):
            monitor.show(
                Sources(
                    worker=name,
                    backend=backend,
                    served=served,
                    jobs=figures,
                    running=lambda: len(attempts),
                    readiness=Readiness(loop, claimer, watchdog, recording, loads),
                    recording=recording,
                    loads=loads,
                )
            )
            logger.info("worker %s serves %s", name, ", ".join(sorted(set(served.values()))))
            if tokenizers:
                tokenizers.start()
            try:
                loop.run()
            finally:
                if tokenizers:
                    tokenizers.close()
                written = not recorder or write_last_rows(recorder, loop, redis_url, burst=burst)
        if recorder and not written and loop.stop_at is None:
            fault = recorder.state["error"] or "other workers hold them"
            raise JobError("unavailable", f"all jobs have ended, but rows are not written: {fault}")
    except redis.RedisError as error:
        raise redis_failure(client, error) from None
    finally:
        monitor.close()
        backend.close()
        client.close()


def _load(backend: Backend, specs: Sequence[ModelSpec]) -> list[tuple[ModelInfo, float]]:
    """Load models in order; with the seconds of each load. Raises JobError if one cannot be loaded,
    or if two have the same name, since queues are named after models."""
    loaded: list[tuple[ModelInfo, float]] = []
    named: list[tuple[str, ModelSpec]] = []
    for spec in specs:
        begin = time.monotonic()
        info = backend.load(spec)
        named.append((info.name, spec))
        _check_names(named)
        logger.info("loaded %s", info.described)
        loaded.append((info, time.monotonic() - begin))
    return loaded


class Managed(NamedTuple):
    """The models of a worker with a budget, and their shares of it."""

    backend: SwappingBackend
    budget: int
    models: list[Model]


def _managed(
    backend: Backend, specs: Sequence[ModelSpec], policies: Mapping[str, ResidencyPolicy]
) -> Managed | None:
    """The models with their shares of the budget; None without a budget. Raises JobError."""
    references = [spec.reference for spec in specs]
    twice = next((one for one in references if references.count(one) > 1), None)
    if twice is not None:
        raise invalid(f"model '{twice}' is given twice: name each model once", "model")
    budget = backend.memory().budget
    if budget is None or not isinstance(backend, SwappingBackend):
        if any(one != ResidencyPolicy() for one in policies.values()):
            raise invalid(
                "pin, preload and keep_alive need memory: the budget within which models come and "
                "go",
                "memory",
            )
        return None
    named = [(backend.footprint(spec), spec) for spec in specs]
    for count in range(1, len(named) + 1):
        _check_names([(found.name, spec) for found, spec in named[:count]])
    given = {found.name: policies.get(spec.reference, ResidencyPolicy()) for found, spec in named}
    shares = share_out(
        [found for found, _ in named],
        budget,
        pinned={name for name, one in given.items() if one.pin},
        caches={found.name: spec.cache_bytes for found, spec in named},
    )
    for name, share in shares.items():
        logger.info("%s takes %s of the budget of %s", name, share, size(budget))
    models = [
        Model(found.name, spec, shares[found.name], given[found.name]) for found, spec in named
    ]
    return Managed(backend, budget, models)


def _check_names(named: Sequence[tuple[str, ModelSpec]]) -> None:
    """Raise JobError if the last model has a name of one of the others."""
    *others, (name, spec) = named
    for other_name, other in others:
        if name == other_name:
            raise invalid(
                f"two models are called '{name}': they would share a queue; rename one folder",
                "model",
            )
        for one, own, names in (
            (spec, spec.aliases, {other_name, other.reference, *other.aliases}),
            (other, other.aliases, {name, spec.reference}),
        ):
            if shared := names.intersection(own):
                raise invalid(
                    f"alias '{min(shared)}' of {one.reference} is also a name of "
                    f"{(other if one is spec else spec).reference}: each name is for one model",
                    "aliases",
                )
