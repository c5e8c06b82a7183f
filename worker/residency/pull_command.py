"""The command with which an operator has a worker download a model: pull.

A child process downloads (worker/loading/pull.py), and is killed when the command ends: the worker
stops at once, whatever the network does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jobs.errors import JobError
from worker.model_spec import ModelSpec
from worker.queue.operator_commands import Facts, Handler, Task

STEPS = 1000  # into which the answers divide a download, at most
READ_BYTES = 2**16


class PullCommand:
    """Used by the loop's thread. `names`: the own name of each model of the worker, by all its
    names; `specs`: by their own names. No other model is downloaded."""

    def __init__(self, names: Mapping[str, str], specs: Mapping[str, ModelSpec]) -> None:
        self._names, self._specs = names, specs

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {"pull": self._pull}

    def _pull(self, args: Facts) -> Task:
        """Ends with the model's own name (`model`), its `folder` and whether it was `downloaded`;
        before that, `done_bytes` of `total_bytes`, and whether they are `comparing`."""
        given = args.get("model")
        name = self._names.get(given) if isinstance(given, str) else None
        if name is None:
            raise JobError(
                "model_not_found",
                "a worker downloads only models that it was started to serve; this one serves "
                f"{', '.join(sorted(self._specs))}, not {given!r}",
                "model",
            )
        spec, said = self._specs[name], (-1, False)
        references = [one.reference for one in (spec, spec.draft_spec) if one is not None]
        with _Child(spec.download_dir, references) as child:
            while True:
                news = None
                for line in child.lines():
                    if "error" in line:
                        raise JobError.from_dict(line["error"])
                    if "folder" in line:
                        return {"model": name, **line}
                    part = STEPS * line["done_bytes"] // max(1, line["total_bytes"])
                    step = part, line["comparing"]
                    if step != said:
                        news, said = {"model": name, **line}, step
                yield news


class _Child:
    """The process that downloads, as a context manager. Nothing of it blocks."""

    def __init__(self, cache: Path | None, references: Sequence[str]) -> None:
        self._command = [sys.executable, "-P", "-m", "worker.loading.pull"]
        self._command += ["" if cache is None else str(cache), *references]
        self._rest = b""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the worker, which has its grace period
            env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def lines(self) -> list[dict[str, Any]]:
        """What it has written since the last call. Raises JobError if it has ended without a
        result."""
        status = self._process.poll()  # first: nothing is written after the end
        while chunk := self._stdout.read(READ_BYTES):
            self._rest += chunk
        *whole, self._rest = self._rest.split(b"\n")
        if status is not None and not whole:
            raise JobError(
                "internal",
                f"the download ended by itself (status {status}): try again, complete files are "
                "kept",
            )
        return [json.loads(line) for line in whole]
