"""The Lua functions that scripts have in front. Each rule that scripts share is in one of them.

A text begins with the texts that it needs, unless its comment says which come before it.
"""

from __future__ import annotations

from jobs import lua
from jobs.store import expiry

_IN_LUA = ("OPEN_SESSION_SECONDS", "TENANT_RUNNING_SECONDS", "ENDED_LOG_SECONDS")

EXPIRY_LUA = "".join(f"local {name} = {getattr(expiry, name)}\n" for name in _IN_LUA)
QUEUE_LUA = lua.load("jobs.store", "queue", EXPIRY_LUA)  # lists in which the jobs of a queue wait
DEPENDENTS_LUA = lua.load("jobs.store", "dependents", QUEUE_LUA)  # jobs that wait for other jobs
TURNS_LUA = lua.load("jobs.store", "turns")  # of sessions; behind QUEUE_LUA
RESERVATIONS_LUA = lua.load("jobs.store", "reservations")  # rows and bytes; behind QUEUE_LUA
# Behind QUEUE_LUA and RESERVATIONS_LUA:
DELETE_JOB_LUA = lua.load("jobs.store", "delete_job")  # jobs that no worker runs
TENANT_RUNNING_LUA = lua.load("jobs.store", "tenant_running")  # behind QUEUE_LUA
STATUSES_LUA = lua.load("jobs.store", "statuses")  # of workers
# Behind QUEUE_LUA and STATUSES_LUA:
AFFINITY_LUA = lua.load("jobs.store", "affinity")  # of sessions to workers
LONGER_LUA = lua.load("jobs.store", "longer")  # jobs that are too long for a worker
LEASE_LUA = lua.load("jobs.store", "lease")  # of a started job; behind TENANT_RUNNING_LUA
STREAM_END_LUA = lua.load("jobs.store", "end_stream")  # behind QUEUE_LUA
JOB_END_LUA = lua.load(
    "jobs.store", "job_end", DEPENDENTS_LUA, TURNS_LUA, RESERVATIONS_LUA, STREAM_END_LUA
)
