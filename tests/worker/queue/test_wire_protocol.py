"""The commands for redis-cli of docs/wire-protocol.md do what the page says."""

from __future__ import annotations

import base64
import json
import re
import shlex
from typing import Any

from tests.worker.fake_backend import text_of
from tests.worker.site import ROOT, Site, wait_until

PAGE = (ROOT / "docs" / "wire-protocol.md").read_text(encoding="utf-8")


def commands(section: str) -> list[list[str]]:
    """The words of each command of a section."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [shlex.split(line) for line in re.findall(r"^    redis-cli (.*)$", text, re.MULTILINE)]


def send(site: Site, section: str, job: str = "hello-1", words: str = "") -> list[Any]:
    """The replies to the commands of a section, for this job. `words`: further fields of the
    request."""
    replies = []
    for command in commands(section):
        given = [re.sub("hello-[12]", job, word) for word in command]
        given = [word.replace('"max_tokens"', f'{words}"max_tokens"') for word in given]
        replies.append(site.redis.execute_command(*given))
    return replies


def test_a_job_is_submitted_followed_read_and_cancelled_by_redis_cli(site: Site) -> None:
    worker = site.worker(models=["demo"], lease_seconds=30.0)
    send(site, "Submit")
    (stream,) = send(site, "Stream")
    (entries,) = stream.values() if isinstance(stream, dict) else (stream[0][1],)
    assert entries[0][0] == b"1-1"
    first = json.loads(_field(entries[0], b"d"))
    assert first["p"][0]["i"] == 0 and first["p"][0]["c"]
    ended, (status, error), results = send(site, "State and result")
    assert ended and (status, error) == (b"finished", None)
    completion = json.loads(base64.b64decode(_field(results[0], b"return_value")))
    assert completion["object"] == "chat.completion"
    answer = completion["choices"][0]["message"]["content"]
    assert answer == text_of(site.client.job("hello-1").request)  # the client reads it as well
    assert answer == site.client.job("hello-1").result(timeout=1).text
    last = json.loads(site.redis.xrevrange("chatjobs:{hello-1}:log", count=1)[0][1][b"d"])
    assert last["end"] == "stop" and last["usage"]

    send(site, "Submit", "waits", words='"metadata":{"words":"100000"},')
    wait_until(lambda: site.redis.hget("rq:job:waits", "status") == b"started")
    send(site, "Cancel", "waits")
    wait_until(lambda: site.redis.hget("rq:job:waits", "status") == b"canceled")
    assert json.loads(site.redis.hget("rq:job:waits", "chatjobs_error"))["code"] == "cancelled"
    assert worker.stop() == 0


def _field(entry: Any, name: bytes) -> bytes:
    """A field of an entry of a stream, as redis-py gives it to a plain command."""
    fields = entry[1]
    if isinstance(fields, dict):
        return bytes(fields[name])
    return bytes(fields[fields.index(name) + 1])
