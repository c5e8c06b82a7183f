"""Refuses to go on with a run whose answers are of other versions of its models than workers serve.

The rows of a run that goes on would be a mixture of both. A model is compared once, when a worker
that serves it is seen.
"""

from __future__ import annotations

from redis import Redis

from jobs.errors import invalid
from jobs.results.files import Results
from jobs.results.model_versions import Answers, difference, read_answers
from jobs.sizes import counted
from jobs.store.worker_status import read_statuses


class SameVersions:
    """Compares the answers of one run with its workers."""

    def __init__(self, redis: Redis, results: Results, run: str) -> None:
        self._redis, self._results, self._run = redis, results, run
        self._left: dict[str, list[Answers]] | None = None  # models to compare; None: not read yet

    def restart(self) -> None:
        """Compare all models again, with the files of now."""
        self._left = None

    def check(self) -> None:
        """Raise InvalidRequest if a worker serves a version that has made no answer of its model,
        while others have. Call it before rows are enqueued. Workers of older versions of chatjobs
        do not say what they serve."""
        if self._left is None:
            self._left = self._read()
        if not self._left:
            return
        workers = read_statuses(self._redis)
        for model, answers in [*self._left.items()]:
            served = workers.versions(model)
            for worker, version in served.items():
                if all(version != one.version for one in answers):
                    rows = counted(sum(one.rows for one in answers), "answer")
                    raise invalid(
                        f"run {self._run!r} has {rows} of another version of {model!r} than worker "
                        f"{worker} serves now ({difference(answers[0].version, version)}): serve "
                        "that version again, choose another --run, or remove the rows with "
                        f"chatjobs results rm {self._run}",
                        "run",
                    )
            if served:
                del self._left[model]

    def _read(self) -> dict[str, list[Answers]]:
        found: dict[str, list[Answers]] = {}
        if self._run in self._results.runs():
            for one in read_answers(self._results.dataset(self._run)):
                found.setdefault(one.model, []).append(one)
        return found
