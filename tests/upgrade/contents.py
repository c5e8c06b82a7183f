"""The jobs and texts of the recording, which record.py makes and test_upgrade.py looks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CACHED = "Answer in one word about the weather."
SESSION = "Sort words by their letters. " * 6


def chat(id: str, text: str = "Sort: pear apple", **job: Any) -> Any:
    """A request to the demo model with a short answer. `job`: its job options."""
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 8,
        "job": {"id": id, **job},
    }


FINISHED = chat("finished")
STREAMED = chat("streamed") | {"stream": True}
# Its worker was killed while it generated.
OPEN = chat("open") | {"stream": True, "max_tokens": 200, "ignore_eos": True}
# Rows in Parquet: two files, one answer each but for the first job, and no answer for the others.
WRITTEN = [
    chat("written-0", run="written", row=0) | {"n": 2},
    chat("written-1", run="written", row=1),
    chat("too-long", "word " * 2000, run="written", row=2),
    chat("cancelled", run="written", row=3) | {"max_tokens": 300, "ignore_eos": True},
]
UNWRITTEN = [chat(f"unwritten-{row}", run="unwritten", row=row) for row in range(2)]
# Rows of a file that a worker had planned when it was killed.
PLANNED = [chat(f"planned-{row}", run="planned", row=row) for row in range(2)]
# In the queues of the workers.
WAITING = [
    chat("queued", run="waiting", row=0),
    chat("bulk", run="waiting", row=1, priority="bulk"),
    *(chat(f"acme-{row}", run="waiting", row=row, tenant="acme") for row in (2, 3, 4)),
    chat("blue", run="waiting", row=5, tenant="blue"),
    chat("scheduled", run="waiting", row=6, delay=1),
]
EXPIRED = chat("expired", ttl=1)
RQ = ("of-rq", "of-rq-dependent")  # jobs of RQ's own enqueue
TURNS = ("Sort: b a", "Sort: d c", "Sort: f e", "Sort: h g")  # two have ended
# The lines of a file that the command submits as run "file".
FILE = [
    {
        "custom_id": name,
        "messages": [{"role": "user", "content": f"Sort: {name} a"}],
        "max_tokens": 4,
    }
    for name in ("x", "y")
]


def write_file(folder: Path) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in FILE))
    return path
