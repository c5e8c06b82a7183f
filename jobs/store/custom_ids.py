"""Rows that `custom_id` identifies: a request of a run keeps its row wherever it is in a file.

`chatjobs submit` calls this: `FileRows` names the requests of a file that would be refused, without
a change in Redis, and `enqueue_rows` enqueues them. enqueue.lua decides who has a row, and notes
it for the custom_id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from redis import Redis

from jobs import keys
from jobs.api.request import ChatRequest
from jobs.encoding import to_json
from jobs.errors import JobError
from jobs.store.damage import Damaged, damage_of
from jobs.store.enqueue import Enqueued
from jobs.store.enqueue_errors import custom_id_taken, id_taken, row_taken
from jobs.store.new_job import NewJob, custom_id_digest, is_keyed, new_job
from jobs.store.reservations import is_unwritten, job_of
from jobs.store.rq_layout import DATA, job_key, queue_names

# The remedy if the number of a line without custom_id is taken. A custom_id is none in a run whose
# rows were submitted without.
OTHER_RUN = (
    "submit these lines with another --run; in a new run, lines with a custom_id keep their rows "
    "when the file changes"
)
ROUNDS = 100  # in which requests get other rows, before an endless one ends
KEYS_AT_ONCE = 10  # hashes of reservations that are read in one round trip
MAX_COMPARED = 20  # refused requests of a file, which may differ in the model alone
ALL_ROWS = (1 << keys.ROWS_PER_KEY) - 1  # bits of the rows of one key


def content_id(request: ChatRequest) -> str:
    """A job id of the whole content of a request."""
    return hashlib.blake2b(to_json(request.to_dict()).encode(), digest_size=16).hexdigest()


def enqueue_rows(
    redis: Redis,
    try_submit: Callable[[list[ChatRequest]], list[Enqueued | JobError]],
    requests: Sequence[ChatRequest],
) -> list[Enqueued | JobError]:
    """Give requests of a file their rows, and enqueue them: for each its job, or why it is refused.
    `try_submit` is that of `Client` with `by_custom_id`. Raises JobError if none is enqueued, and
    redis.RedisError.

    A custom_id that loses its row to another submit at the same time gets another one.
    """
    found: dict[int, Enqueued | JobError] = {}
    left = list(range(len(requests)))
    for _ in range(ROUNDS):
        given = FileRows(redis, is_checked=True).give([requests[n] for n in left])
        found |= {n: error for n, error in zip(left, given, strict=True) if error is not None}
        ready = [n for n, error in zip(left, given, strict=True) if error is None]
        sent = try_submit([requests[n] for n in ready]) if ready else []
        found |= zip(ready, sent, strict=True)
        left = [n for n in ready if _has_lost_row(found[n])]
        if not left:
            break
    return [found[n] for n in range(len(requests))]


def _has_lost_row(one: Enqueued | JobError) -> bool:
    return isinstance(one, JobError) and one.param == "job.custom_id"


class FileRows:
    """The rows of the requests of a file: those that Redis has, and those that `give` has given to
    the requests before. Changes nothing in Redis.

    `is_checked`: the whole file was checked, and may be enqueued. A check gives no custom_id a row
    behind those of a run that were all submitted without: that would repeat the work of the request
    that has its proposed row.
    """

    def __init__(self, redis: Redis, *, is_checked: bool = False) -> None:
        self._redis = redis
        self._is_checked = is_checked
        self._taken: dict[str, int] = {}  # bits of the rows of the requests before, by their key
        self._stored: dict[str, int] = {}  # next_row of each run in Redis; 0 if it has none
        self._next: dict[str, int] = {}  # and behind the rows of the requests before
        self._compared = 0  # refused requests, with the same ones for other models

    def give(self, requests: Sequence[ChatRequest]) -> list[JobError | None]:
        """Set `job.row` of the requests that custom_id identifies: the row that the custom_id has,
        or else the proposed one, or, if another request has that, the first one behind all rows
        that were given so. Returns why each request would be refused. Raises JobError for a key
        that another program has written, and redis.RedisError."""
        known = self._known_rows(requests)
        jobs = [
            new_job(_with_row(request, known.get(number, request.job.row)))
            for number, request in enumerate(requests)
        ]
        held = self._held_by_others(jobs)
        self._read_next(requests)  # after the reservations: a submit at the same time writes both
        refused: dict[int, JobError] = {}
        for number, (request, job) in enumerate(zip(requests, jobs, strict=True)):
            row = job.request.job.row
            if row is None:
                continue
            if number in held or self._is_taken(job.run, row):
                has_place = self._is_checked or number not in held or self._stored.get(job.run)
                if number in known or not is_keyed(request) or not has_place:
                    refused[number] = self._row_taken(job, held.get(number))
                    continue
                row = self._free_row(job.run, row + 1)
            self._take(job.run, row)
            if is_keyed(request):
                self._next[job.run] = max(self._next[job.run], row + 1)
                request.job.row = row
        refused.update(self._taken_ids(requests))
        return [refused.get(number) for number in range(len(requests))]

    def _read_next(self, requests: Sequence[ChatRequest]) -> None:
        """Read next_row of the runs that had none so far."""
        runs = {one.job.run or "" for one in requests if is_keyed(one)}
        runs -= {run for run, stored in self._stored.items() if stored}
        names = [keys.next_row(run) for run in runs]
        for run, value in zip(runs, self._read([("get", name) for name in names]), strict=True):
            self._stored[run] = _number(value) or 0
            self._next[run] = max(self._next.get(run, 0), self._stored[run])

    def _known_rows(self, requests: Sequence[ChatRequest]) -> dict[int, int]:
        """The rows that requests have by their custom_id, by their place in the list."""
        keyed = [number for number, one in enumerate(requests) if is_keyed(one)]
        options = [requests[number].job for number in keyed]
        replies = self._read(
            [
                ("hget", keys.custom_ids(one.run or "", name), custom_id_digest(name))
                for one in options
                for name in [one.custom_id or ""]
            ]
        )
        rows = zip(keyed, map(_number, replies), strict=True)
        return {number: row for number, row in rows if row is not None}

    def _held_by_others(self, jobs: Sequence[NewJob]) -> dict[int, bytes]:
        """The reservations of the rows that another request has, by the place of the job in the
        list. The row of a job that has left Redis without a row is free, as in enqueue.lua."""
        rows = [(n, job, job.request.job.row) for n, job in enumerate(jobs)]
        with_row = [(n, job, row) for n, job, row in rows if row is not None]
        replies = self._read(
            [
                ("hget", keys.rows(job.run, row), keys.row_field(row, job.request.job.repeat))
                for _, job, row in with_row
            ]
        )
        others: dict[int, bytes] = {
            n: reservation
            for (n, job, _), reservation in zip(with_row, replies, strict=True)
            if reservation and not reservation.startswith(job.digest)
        }
        unwritten = [n for n, reservation in others.items() if is_unwritten(reservation)]
        owners = [job_of(others[n], jobs[n].run, jobs[n].request.job.row or 0) for n in unwritten]
        exists = self._read([("exists", job_key(one)) for one in owners])
        free = {n for n, there in zip(unwritten, exists, strict=True) if not there}
        return {n: reservation for n, reservation in others.items() if n not in free}

    def _taken_ids(self, requests: Sequence[ChatRequest]) -> dict[int, JobError]:
        """The errors of requests whose own id another job has, by their place in the list."""
        jobs = {n: new_job(one) for n, one in enumerate(requests) if one.job.id}
        found = self._read([("hget", job_key(job.id), DATA) for job in jobs.values()])
        others = {
            n: data
            for (n, job), data in zip(jobs.items(), found, strict=True)
            if data is not None and data != job.data
        }
        return {n: self._id_taken(jobs[n], data) for n, data in others.items()}

    def _id_taken(self, job: NewJob, data: bytes) -> JobError:
        """The error of a job whose id another one has."""
        return id_taken(job.id, self._model_of_same(job, lambda one: one.data == data))

    def _row_taken(self, job: NewJob, reservation: bytes | None) -> JobError:
        """The error of a job whose row another request has; without a reservation, one of the same
        file."""
        options, model = job.request.job, None
        if reservation:
            model = self._model_of_same(job, lambda one: reservation.startswith(one.digest))
        if options.custom_id is not None:
            return custom_id_taken(job.run, options.custom_id, options.row, model)
        return row_taken(job.run, options.row, OTHER_RUN, model)

    def _model_of_same(self, job: NewJob, is_same: Callable[[NewJob], bool]) -> str | None:
        """The other model for which the same request was submitted; None if there is none, and for
        all but the first refused requests of a file."""
        self._compared += 1
        queues = queue_names(self._redis) if self._compared <= MAX_COMPARED else []
        models = {keys.model_of(queue) for queue in queues if keys.is_queue(queue)}
        for model in sorted(models - {job.request.model}):
            if is_same(new_job(job.request.model_copy(update={"model": model}))):
                return model
        return None

    def _is_taken(self, run: str, row: int) -> bool:
        return bool(self._taken.get(keys.rows(run, row), 0) >> row % keys.ROWS_PER_KEY & 1)

    def _take(self, run: str, row: int) -> None:
        name = keys.rows(run, row)
        self._taken[name] = self._taken.get(name, 0) | 1 << row % keys.ROWS_PER_KEY

    def _free_row(self, run: str, first: int) -> int:
        """The first free row from `first` on, behind all that were given by custom_id."""
        row = max(first, self._next[run])
        while True:
            starts = [row + n * keys.ROWS_PER_KEY for n in range(KEYS_AT_ONCE)]
            names = [keys.rows(run, start) for start in starts]
            fields = self._read([("hkeys", name) for name in names])
            for name, reserved in zip(names, fields, strict=True):
                bits = self._taken.get(name, 0) | _bits(reserved)
                free = ALL_ROWS & ~bits & -1 << row % keys.ROWS_PER_KEY
                if free:
                    return row - row % keys.ROWS_PER_KEY + (free & -free).bit_length() - 1
                row += keys.ROWS_PER_KEY - row % keys.ROWS_PER_KEY

    def _read(self, commands: Sequence[tuple[str, ...] | tuple[str, str, bytes]]) -> list[Any]:
        """The replies to commands of one key each, in one round trip."""
        pipeline: Any = self._redis.pipeline(transaction=False)
        for name, *args in commands:
            getattr(pipeline, name)(*args)
        try:
            replies: list[Any] = pipeline.execute() if commands else []
        except Damaged as error:
            names = [str(key) for _, key, *_ in commands]
            if damaged := damage_of(self._redis, error, names):
                raise JobError("internal", f"the rows can't be enqueued: {damaged[0]}") from None
            raise
        return replies


def _number(value: bytes | None) -> int | None:
    """The number of a row; None for a value that another program has written."""
    return int(value) if value is not None and value.isdigit() and len(value) < 16 else None


def _bits(fields: Sequence[bytes]) -> int:
    """The bits of the rows in a hash of reservations."""
    numbers = (_number(field) for field in fields)
    return sum(
        1 << number for number in set(numbers) if number is not None and number < keys.ROWS_PER_KEY
    )


def _with_row(request: ChatRequest, row: int | None) -> ChatRequest:
    return request.model_copy(update={"job": request.job.model_copy(update={"row": row})})
