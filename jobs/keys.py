"""The names of all queues, keys and channels of chatjobs in Redis. RQ's are in store/rq_layout.py.

The names of one job, or one session, have its id in braces, so that they can be told from those of
a model, a run or a worker.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")
RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
SESSION_ID = re.compile(r"[A-Za-z0-9_.:@-]{1,200}")

# Function names of the jobs of any version: a worker leaves those that it does not run to others.
TASKS = re.compile(r"worker\.tasks\.[a-z][a-z_]{0,49}")
_QUEUE = re.compile(rf"(chat|bulk):(.*?)(?: ({TASKS.pattern}))?", re.DOTALL)

CONTROL = "chatjobs:control"  # pub/sub: cancel
OUTBOXES = "chatjobs:outboxes"  # set: runs that have an outbox
WORKERS = "chatjobs:workers"  # sorted set: workers, by the end of their lease in ms since the epoch
STOPPING = "chatjobs:stopping"  # set: workers that have announced their end
REAPER = "chatjobs:reaper"  # the worker that returns the jobs of dead ones now; expires
RECORDER = "chatjobs:recorder"  # the recorder that has looked at the outboxes last; expires
RECORDERS = "chatjobs:recorders"  # sorted set: recorder processes, by the end of their status in ms
BACKLOG = "chatjobs:backlog"  # hash: rows and bytes in all outboxes, as counted last; expires
WANTED = "chatjobs:wanted"  # set: runs whose rows somebody waits for; they are written at once
ID = "chatjobs:id"  # random id of the queues in this Redis: a request that comes back has it
RESULTS = "chatjobs:results"  # JSON: id, host and path of the results folder of all workers
BARRIER = "chatjobs:barrier"  # pub/sub: a write that WAIT waits for; nobody subscribes
LIMITS = "chatjobs:limits"  # hash: the limits that an operator has set
OPEN_BYTES = "chatjobs:open-bytes"  # hash: bytes of the jobs that have not ended, by queue key
TENANT_JOBS = "chatjobs:tenant-jobs"  # hash: jobs that wait in queues of tenants, by RQ queue
DEADLINES = "chatjobs:deadlines"  # sorted set: jobs with a ttl; scores are their ends in ms

PARKED = 2**52  # scores in `tenants` from here on: tenants that may run no more jobs for now
CUSTOM_ID_BUCKETS = 4096  # hashes of the rows of a run by custom_id
ROWS_PER_KEY = 100  # rows whose reservations share one hash, small enough for a compact one


def chat_queue(model: str) -> str:
    """RQ queue of the interactive jobs of a model."""
    return f"chat:{model}"


def bulk_queue(model: str) -> str:
    """RQ queue of the bulk jobs of a model: served after the chat queue."""
    return f"bulk:{model}"


def is_queue(queue: str) -> bool:
    """True if an RQ queue is one of a model."""
    return _QUEUE.fullmatch(queue) is not None


def model_of(queue: str) -> str:
    """The model of an RQ queue."""
    found = _QUEUE.fullmatch(queue)
    return found[2] if found else ""


def is_bulk(queue: str) -> bool:
    """True if an RQ queue is that of a model's bulk jobs."""
    return queue.startswith(bulk_queue(""))


def func_of(queue: str) -> str | None:
    """The function whose jobs alone belong into an RQ queue. None: any that its workers run."""
    found = _QUEUE.fullmatch(queue)
    return found[3] if found else None


def queue_for(func: str, queue: str) -> str:
    """RQ queue for the jobs of a function that the workers of `queue` do not run: that of the same
    model and priority, for them alone. Other workers do not look there."""
    return f"{queue} {func}"


def queue(model: str, priority: str) -> str:
    """RQ queue of `model` for a job of this priority ("interactive" or "bulk")."""
    return bulk_queue(model) if priority == "bulk" else chat_queue(model)


def tenants(queue: str) -> str:
    """Sorted set of the tenants with waiting jobs in an RQ queue, the next one first; the last
    ones are PARKED."""
    return f"chatjobs:tenants:{queue}"


def tenant_queue(queue: str, tenant: str) -> str:
    """List of the waiting jobs of a tenant in an RQ queue. Both names may have colons: the first
    space, which tenants can't have, separates them."""
    return f"chatjobs:tenant:{tenant} {queue}"


def tenant_running(tenant: str) -> str:
    """Set of the running jobs of a tenant, as in `started`. Expires."""
    return f"chatjobs:tenant-running:{tenant}"


def quarantine(queue: str) -> str:
    """List of the jobs of an RQ queue that may have killed their workers; `chatjobs_group` in their
    hashes names the group that is run together."""
    return f"chatjobs:quarantine:{queue}"


def quarantine_worker(queue: str) -> str:
    """The busy worker that takes no further jobs in order to run suspects of a queue; expires."""
    return f"chatjobs:quarantine-worker:{queue}"


def loading(model: str) -> str:
    """The worker that brings this model into its memory now; expires."""
    return f"chatjobs:loading:{model}"


def upkeep(queues: Iterable[str]) -> str:
    """The worker that maintains these queues now; expires."""
    return f"chatjobs:upkeep:{','.join(sorted(queues))}"


def wake(queue: str) -> str:
    """List that workers with room for the jobs of an RQ queue wait on: whoever has put a job into
    the queue pushes to it. Its length is limited."""
    return f"chatjobs:wake:{queue}"


def wake_worker(name: str) -> str:
    """List that one worker waits on: others push to it when they leave a turn of a session to it,
    and the worker itself when it must wait for other jobs than so far. Expires."""
    return f"chatjobs:wake-worker:{name}"


def log(job: str) -> str:
    """Replay log of a job's tokens: a Redis stream with ids `<attempt>-<seq>` that expires."""
    return f"chatjobs:{{{job}}}:log"


def live(job: str) -> str:
    """Pub/sub channel: the entries of the log as they are written."""
    return f"chatjobs:{{{job}}}:live"


def session(name: str) -> str:
    """Hash of a session: model, system, options, ttl, bytes, creation, and the worker that has its
    state. Its keys expire."""
    return f"chatjobs:{{{name}}}:session"


def turns(session: str) -> str:
    """List of the turns of a session, each as JSON (`jobs.api.conversation.Turn`)."""
    return f"chatjobs:{{{session}}}:turns"


def open_turns(session: str) -> str:
    """List of the jobs of a session that have not ended: the first one runs, the others wait."""
    return f"chatjobs:{{{session}}}:open"


def response(job: str) -> str:
    """Hash of a response that can be read again: its tenant, and what its job does not hold.
    Expires."""
    return f"chatjobs:{{{job}}}:response"


def tenant_responses(tenant: str) -> str:
    """Sorted set of the jobs of the responses that a tenant has stored, by the time when each
    expires, in seconds. Expires."""
    return f"chatjobs:responses:{tenant}"


def outbox(run: str) -> str:
    """Redis stream of the ended jobs whose rows are not in Parquet yet."""
    return f"chatjobs:outbox:{run}"


def rows(run: str, row: int) -> str:
    """Hash of the reserved rows near `row`: the request that has each, as a digest."""
    return f"chatjobs:rows:{run}:{row // ROWS_PER_KEY}"


def row_field(row: int, repeat: int | None) -> str:
    """The field of a sample of a row in the hash of reserved rows."""
    return f"{row % ROWS_PER_KEY}.{repeat}" if repeat else f"{row % ROWS_PER_KEY}"


def custom_ids(run: str, name: str) -> str:
    """Hash of the rows of some custom_ids of a run, `name` among them, by their digests. There are
    many such hashes, so that those of a long run are small enough for compact ones."""
    bucket = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=2, salt=b"bucket").digest())
    return custom_ids_bucket(run, bucket % CUSTOM_ID_BUCKETS)


def custom_ids_bucket(run: str, bucket: int) -> str:
    """One of the CUSTOM_ID_BUCKETS hashes of `custom_ids`, by its number."""
    return f"chatjobs:custom-ids:{run}:{bucket}"


def next_row(run: str) -> str:
    """The number behind all rows of a run that were given by custom_id."""
    return f"chatjobs:next-row:{run}"


def producer(run: str) -> str:
    """The lease of the process that enqueues the rows of a run; expires."""
    return f"chatjobs:producer:{run}"


def parts(run: str) -> str:
    """Hash of part plans: which outbox entries an unfinished Parquet file will contain."""
    return f"chatjobs:parts:{run}"


def worker(name: str) -> str:
    """The status of a worker, as JSON; expires soon if the worker does not renew it."""
    return f"chatjobs:worker:{name}"


def tokenizer(fingerprint: str) -> str:
    """Tokenizer and chat templates of a model, compressed, by the hash of their content. Expires
    if no worker that serves the model renews it."""
    return f"chatjobs:tokenizer:{fingerprint}"


def answers(command: str) -> str:
    """List of a worker's answers to a command of an operator, which has this id. Expires."""
    return f"chatjobs:answers:{command}"


def recorder(name: str) -> str:
    """The status of a recorder process, as JSON; expires soon if it does not renew it."""
    return f"chatjobs:recorder:{name}"


def started(name: str) -> str:
    """Sorted set of the jobs that a worker has started, in the order of its claims. Members are
    `<execution> <job> <queue>`."""
    return f"chatjobs:started:{name}"
