"""The token stream of a job on the wire: its entries, and the writer's end.

Each entry of the replay log `keys.log(job)` (a Redis stream) has the id `<attempt>-<seq>` and one
field `d`, a JSON object. The same goes out on the channel `keys.live(job)` as
`{"id": "<attempt>-<seq>", "d": {…}}`. Two forms of `d`:

    {"p": [{"i": 0, "c": "text", "r": "reasoning", "l": [TokenLogprob…], "f": "stop"}, …]}
    {"end": "stop|length|tool_calls|cancelled|error", "usage": {…}, "error": {…}}

The first is what one or more engine steps added: `i` is the choice, all other keys are left out
when empty. Its seq counts from 1 without holes in each attempt. The second is written once, by the
script that settles the job, with seq END_SEQ; it wakes the followers, who then ask the job for its
state.

Ids only grow, so Redis itself refuses what a worker writes after a later attempt has begun or the
stream has ended. `jobs.client.follow` is the reader's end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from redis import Redis

from jobs import keys
from jobs.api.answer import FinishReason, TokenLogprob
from jobs.errors import JobError

END_SEQ = 2**53 - 1  # seq of the end entry: after all others, exact in every language's numbers
LOG_ENTRIES = 2**16  # a log keeps about this many; who comes later gets the result instead
LOG_SECONDS = 3600  # a log lives this long after its last entry
LOG_SECONDS_AFTER_END = 600  # and this long after the end entry; the job has the whole answer

EndReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]

# KEYS: log, live. ARGV: id, payload, seconds to live, entries to keep.
# Answers 1 if the entry is in the log, 0 if it was refused. Writing an entry twice is harmless: the
# client library sends a script again when a connection breaks before the answer.
APPEND = """
local id, payload = ARGV[1], ARGV[2]
local added = redis.pcall('XADD', KEYS[1], 'MAXLEN', '~', ARGV[4], id, 'd', payload)
if type(added) == 'table' and added.err then
  if not string.find(added.err, 'equal or smaller', 1, true) then return added end
  local there = redis.call('XRANGE', KEYS[1], id, id)
  return (there[1] and there[1][2][2] == payload) and 1 or 0
end
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('PUBLISH', KEYS[2], '{"id":"' .. id .. '","d":' .. payload .. '}')
return 1
"""

# For scripts that settle a job: `end_stream(log, live, id, payload)` appends the end entry, if the
# stream takes it. `id` is end_id(attempt), `payload` is end_payload(…). Paste before the script.
END_LUA = f"""
local function end_stream(log, live, id, payload)
  local added = redis.pcall('XADD', log, id, 'd', payload)
  if type(added) == 'table' and added.err then return end
  redis.call('EXPIRE', log, {LOG_SECONDS_AFTER_END})
  redis.call('PUBLISH', live, '{{"id":"' .. id .. '","d":' .. payload .. '}}')
end
"""


class Entry(NamedTuple):
    """One entry to write. `seq` counts from 1 in each attempt."""

    job: str
    attempt: int
    seq: int
    payload: dict[str, Any]


def piece(
    choice: int,
    content: str = "",
    reasoning: str = "",
    logprobs: Sequence[TokenLogprob] = (),
    finish_reason: FinishReason | None = None,
) -> dict[str, Any]:
    """One element of `p`: what was added to one choice."""
    made: dict[str, Any] = {"i": choice}
    if content:
        made["c"] = content
    if reasoning:
        made["r"] = reasoning
    if logprobs:
        made["l"] = [token.to_dict() for token in logprobs]
    if finish_reason:
        made["f"] = finish_reason
    return made


def pieces_payload(pieces: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The payload of an entry that carries text."""
    return {"p": list(pieces)}


def end_payload(
    reason: EndReason, usage: dict[str, Any] | None = None, error: JobError | None = None
) -> str:
    """The end entry's payload, as JSON text for `end_stream`. usage: Usage's JSON."""
    payload: dict[str, Any] = {"end": reason}
    if usage is not None:
        payload["usage"] = usage
    if error is not None:
        payload["error"] = error.to_dict()
    return _json(payload)


def end_id(attempt: int) -> str:
    """Id of the end entry of an attempt."""
    return f"{attempt}-{END_SEQ}"


class StreamWriter:
    """Appends entries to the logs of jobs and tells their subscribers; keeps no state."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._append = redis.register_script(APPEND)

    def write_many(self, entries: Sequence[Entry]) -> list[bool]:
        """Write entries of any jobs in one round trip, each one atomically.

        Answers for each whether it is in the log: False means that a later attempt has begun or
        that the stream has ended, so the writer has lost the job. Raises redis.RedisError.
        """
        if not entries:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for entry in entries:
            self._append(
                keys=[keys.log(entry.job), keys.live(entry.job)],
                args=[
                    f"{entry.attempt}-{entry.seq}",
                    _json(entry.payload),
                    LOG_SECONDS,
                    LOG_ENTRIES,
                ],
                client=pipeline,
            )
        return [reply == 1 for reply in pipeline.execute()]


def _json(payload: dict[str, Any]) -> str:
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    # Half a surrogate pair has no UTF-8, but an escape that JSON knows.
    return text.encode("utf-8", "backslashreplace").decode()
