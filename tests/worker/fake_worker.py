"""A real worker process around the fake backend: `python -m tests.worker.fake_worker JSON`.

The JSON object holds arguments of `serve` and of `FakeBackend`. `real`: use the real engine
instead; `script`: token ids with which it answers, one list per choice; `prompt_caches`,
`context`: of its models; `state_dir`: of its host; `abort_seconds`: that its end may take after
the second signal. `fault` names the step of the recorder after which the process kills itself:
planned, durable, written (not renamed), renamed.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from jobs import JobError, signals
from jobs.record import recorder
from jobs.results import files
from tests.worker.fake_backend import FakeBackend
from worker.backend import Backend
from worker.memory_amount import MemoryAmount
from worker.model_spec import ModelSpec
from worker.residency.policy import ResidencyPolicy
from worker.service import serve


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(fault: str) -> None:
    """Kill the process after this step of the recorder's first part."""
    if fault == "planned":
        recorder.Recorder._wait_until_durable = die  # type: ignore[method-assign]
    elif fault == "durable":
        recorder.Recorder._write = die  # type: ignore[method-assign]
    elif fault == "written":
        files._create = die
    elif fault == "renamed":
        recorder.Recorder._commit = die  # type: ignore[method-assign]


def make_real(
    script: list[list[int]] | None, state_dir: Path | None, memory: int | None
) -> Backend:
    from tests.worker.scripted import scripted
    from worker.host.engine_host import EngineHost
    from worker.sampling.sampler import draw

    draws = draw if script is None else scripted(script)
    amount = None if memory is None else MemoryAmount(nbytes=memory)
    return EngineHost(device="cpu", memory=amount, state_dir=state_dir, draw=draws)


def main() -> int:
    atexit.register(gc.freeze)  # as the command does
    options = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(process)d %(levelname)s %(message)s")
    names = (
        *("max_batch", "delay", "hangs", "sick", "broken", "load_until", "budget"),
        *("load_seconds", "context"),
    )
    is_real = options.pop("real", False)
    context = options.pop("context", None)
    if context is not None and not is_real:
        options["context"] = context
    given = {name: options.pop(name) for name in names if name in options}
    script = options.pop("script", None)
    prompt_caches = tuple(Path(one) for one in options.pop("prompt_caches", []))
    state_dir = Path(options.pop("state_dir")) if "state_dir" in options else None
    memory = options.pop("memory", None)
    backend = make_real(script, state_dir, memory) if is_real else FakeBackend(**given)
    own = {"prompt_caches": prompt_caches, "context": context}
    specs = [
        ModelSpec(reference=one, dtype="fp32", max_batch=4, **own)
        for one in options.pop("models", ["fake"])
    ]
    if options.pop("pinned", False):
        options["policies"] = {one.reference: ResidencyPolicy(pin=True) for one in specs}
    arm(options.pop("fault", ""))
    signals.ABORT_SECONDS = options.pop("abort_seconds", signals.ABORT_SECONDS)
    options["results"] = options["results"] and Path(options["results"])
    options["http"] = options.get("http") and tuple(options["http"])
    try:
        serve(backend, specs, **options)
    except JobError as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
