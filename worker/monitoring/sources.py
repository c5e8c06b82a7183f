"""The owners of the figures that a worker shows over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jobs.store.worker_status import ResultsStatus
from worker.backend import Backend
from worker.monitoring.readiness import Readiness
from worker.queue.job_figures import JobFigures
from worker.queue.load_figures import LoadFigures
from worker.queue.served import Served


@dataclass(frozen=True, slots=True)
class Sources:
    """Any thread may read them. `running`: number of jobs. `recording`: the state of the recorder;
    None if the worker writes no rows."""

    worker: str
    backend: Backend
    served: Served
    jobs: JobFigures
    running: Callable[[], int]
    readiness: Readiness
    recording: Callable[[], ResultsStatus | None]
    loads: Callable[[], LoadFigures]
