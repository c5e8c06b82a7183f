"""The class that Ray Data makes actors of: each holds an engine, and answers batches of rows."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from jobs.errors import JobError, invalid
from jobs.operations import operation_for
from worker.backend import Assembly, Handle, Outcome
from worker.ray_data.arguments import PredictorArguments
from worker.ray_data.loading import load
from worker.ray_data.results import results_of
from worker.ray_data.rows import BatchRow, ErrorRow, RequestRow, RowReader

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.01  # between two looks for the ends of requests
ENGINE_DIED = 70  # exit code of the process: EX_SOFTWARE

Events = queue.SimpleQueue[tuple[int, Assembly | Outcome]]


class EnginePredictor:
    """Answers the rows of a data set with one model, as `chatjobs run` does: for `map_batches`.

        ds.map_batches(
            EnginePredictor,
            fn_constructor_kwargs={"model": "demo", "options": {"max_tokens": 64}},
            batch_format="pyarrow",
            batch_size=64,
            compute=ray.data.ActorPoolStrategy(size=2),
        )

    Each row of a batch becomes a row of the result, with the columns that `chatjobs run` writes. A
    row that can't be answered has an error in `error_type` and `error_message`.

    model          a folder, a GGUF file, a repository id or `demo`, on the node of the actor
    mode           chat, completion, loglikelihood, choice or perplexity
    options        fields of all requests, such as temperature and max_tokens
    columns        fields of rows by the columns that hold them, such as {"question": "prompt"}
    template       Jinja template that makes the prompt of a row from its columns
    delimiter      between a prompt and the text that is scored behind it
    seed           each row gets a seed of its own from it
    run            run_id of the results
    engine_kwargs  arguments of `Engine.load`, such as {"dtype": "fp32", "context": 4096}
    download       whether weights may be downloaded
    """

    def __init__(self, model: str, **others: Any) -> None:
        """Load the model. Never raises JobError: the first batch does, whose error Ray shows
        without that of the actor around it."""
        arguments = PredictorArguments(model, **others)
        self._fault: JobError | None = None
        try:
            self._reader = RowReader(arguments)
            self._backend, info = load(arguments)
            self._provenance = asdict(info)
        except JobError as error:
            self._fault = error

    async def __call__(self, batch: pa.Table) -> pa.Table:
        """The results of a batch. Batches may overlap: their rows share the engine's batch. Raises
        JobError for what no row can be answered with."""
        if self._fault is not None:
            raise self._fault
        if not isinstance(batch, pa.Table):
            raise invalid(
                f"batches must be Arrow tables, got {type(batch).__name__}: give map_batches "
                'batch_format="pyarrow"',
                "batch_format",
            )
        kept = self._reader.kept(batch.column_names)
        rows = self._reader.read(batch)
        return results_of(batch, kept, rows, await self._outcomes(rows), self._provenance)

    def close(self) -> None:
        """Free the memory of the device. Ray ends the process instead."""
        if self._fault is None:
            self._backend.close()

    async def _outcomes(self, rows: Sequence[BatchRow]) -> list[Outcome]:
        events: Events = queue.SimpleQueue()
        outcomes = {
            number: Outcome(error=row.error)
            for number, row in enumerate(rows)
            if isinstance(row, ErrorRow)
        }
        handles: dict[int, Handle] = {}
        try:
            for number, row in enumerate(rows):
                if isinstance(row, RequestRow):
                    operation, sink = operation_for(row.request), RowSink(number, events)
                    handles[number] = self._backend.submit(operation, row.request, sink)
            while len(outcomes) < len(rows):
                await asyncio.sleep(POLL_SECONDS)
                self._require_alive()
                for number, outcome in _ended(events):
                    outcomes[number] = outcome
                    handles[number].cancel()  # sequences of a request that has failed
        finally:
            for number in handles.keys() - outcomes.keys():
                handles[number].cancel()
        return [outcomes[number] for number in range(len(rows))]

    def _require_alive(self) -> None:
        """End the process if the engine's thread has died, which is a defect: Ray starts another
        one, and runs its batches again."""
        health = self._backend.health()
        if not health.alive:
            logger.critical("the engine's thread has died: %s", health.error)
            os._exit(ENGINE_DIED)


class RowSink:
    """Passes the events of a row's request from the engine's thread to that of its batch."""

    hands_on = False  # no other worker may run it

    def __init__(self, number: int, events: Events) -> None:
        self._number, self._events = number, events

    def pending(self, assembly: Assembly) -> None:
        self._events.put((self._number, assembly))

    def ended(self, outcome: Outcome) -> None:
        self._events.put((self._number, outcome))


def _ended(events: Events) -> Iterator[tuple[int, Outcome]]:
    """The requests that have ended, by their number. Deltas are dropped."""
    while not events.empty():
        number, event = events.get()
        outcome = event if isinstance(event, Outcome) else event.take().outcome
        if outcome is not None:
            yield number, outcome
