"""Every expiry of a key in Redis, in seconds.

Scripts use some of them by the same names, see EXPIRY_LUA in preludes.py.
"""

from __future__ import annotations

RESULT_SECONDS = 86_400  # an interactive job that has finished, with its result
BULK_RESULT_SECONDS = 3_600  # a bulk job: its result is a row in Parquet by then
FAILURE_SECONDS = 7 * 86_400  # a job that has failed or was cancelled
SECONDS_WHEN_FULL = 60  # results while Redis is full, at most: rows have them too
ROW_SECONDS = 7 * 86_400  # the reservation of a row, after its submission and after its end
SESSION_SECONDS = 7 * 86_400  # a session, after its last change
OPEN_SESSION_SECONDS = 7 * 86_400  # a session with jobs that have not ended, at least
TENANT_RUNNING_SECONDS = 7 * 86_400  # the running jobs of a tenant, after the last one has started
TOKENIZER_SECONDS = 600  # the tokenizer of a model, after a worker has renewed it
RESPONSE_SECONDS = RESULT_SECONDS  # a response of /v1/responses, and the result of its job
LOG_SECONDS = 3_600  # the tokens of a running job, after the last ones
ENDED_LOG_SECONDS = 600  # the tokens of a job that has ended: its result holds the whole answer
